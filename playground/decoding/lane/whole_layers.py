"""What a lane may ask of an encoder-decoder model, whose layers run whole and as the library has them."""
from __future__ import annotations

from collections.abc import Iterable

from playground.contract import CachePolicy, ComputePolicy, Overlay, ReadsSource, Strategy
from playground.engine.model import Model
from playground.errors import Refusal


def check_runs_whole(model: Model, parts: Iterable[Strategy]) -> None:
    """Raise Refusal for a part that reads or changes what happens between the layers of an encoder-decoder model."""
    if not model.has_encoder:
        return
    for part in parts:
        asks = bool(part.reads_hidden or part.state_layers(model.depth) or part.inner(model.depth, model.tied))
        if asks or isinstance(part, CachePolicy | ComputePolicy | Overlay) and not isinstance(part, ReadsSource):
            raise Refusal(
                f"{model.name} has an encoder and a decoder, whose layers run whole inside the transformers library: "
                f"remove {part.title}, or choose a causal model.",
                part.name,
            )
