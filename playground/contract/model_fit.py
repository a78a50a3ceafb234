"""Whether a decoder fits a model: one continues text, another fills masked positions, and each way of seeing them has
decoders of its own.
"""
from __future__ import annotations

from typing import Any

from playground.contract.decoder import CanvasDecoder, Decoder
from playground.errors import Refusal

# of a model that fills masked positions, by its attention: what it does, which one to choose, and a decoder for it
SEES = {
    "full": "sees the whole canvas", "block": "sees its block and earlier ones",
    "known_first": "reads known tokens before masks", "noise": "turns noise into text",
}
DENOISERS = {
    "full": "pocket-diffusion or the oracle", "block": "pocket-block-diffusion",
    "known_first": "a WeDLM checkpoint", "noise": "a DiffusionGemma checkpoint",
}
FITTING = {
    "full": "Masked diffusion", "block": "Masked diffusion or Fast-dLLM", "known_first": "WeDLM",
    "noise": "Entropy bound",
}


def check_model(decoder: Decoder, model: str, attention: str) -> None:
    """Raise Refusal if the decoder fills masked positions and the model continues text, or vice versa, or if it cannot
    run with the model's attention, which is one of SEES; empty if it continues text.
    """
    fills = isinstance(decoder, CanvasDecoder)
    if attention and not fills:
        raise Refusal(
            f"{model} fills masked positions and does not continue text: choose {FITTING[attention]} or another "
            "model.",
            "model",
        )
    if isinstance(decoder, CanvasDecoder) and not attention:
        raise Refusal(
            f"{model} continues text and cannot fill masked positions: choose {DENOISERS[decoder.attention[0]]} as the "
            "model.",
            "model",
        )
    if isinstance(decoder, CanvasDecoder) and attention not in decoder.attention:
        wanted = " or ".join(SEES[one] for one in decoder.attention)
        raise Refusal(
            f"{model} {SEES[attention]}, and {decoder.title} needs a model that {wanted}: choose "
            f"{FITTING[attention]}, or another model.",
            "model",
        )


def attention_of(model: Any) -> str:
    """The attention of a loaded model that fills masked positions; empty if it continues text."""
    return getattr(model, "attention", "full") if getattr(model, "fills", False) else ""
