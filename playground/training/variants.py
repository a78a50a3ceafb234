"""Training ahead of decoding: model variants, knobs fitted to a model, and weights trained for a pair of models."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from playground.algorithms.sampling.token_readings import TokenReading
from playground.contract import ReadsQueries, Strategy, Variant
from playground.decoding.models import Models
from playground.engine.checkpoint.catalogue import BUNDLED, CARD, entries, made_models, partner
from playground.engine.checkpoint.hub_files import Progress, first_sentence, unseen
from playground.engine.forward_input import ForwardInput
from playground.engine.loading.load import Facts
from playground.engine.loading.stored_weights import is_quantised
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Figure, Note
from playground.training.checkpoint import delete_files
from playground.training.draft_rollouts import Sampling, openings, rollouts, world_prompts
from playground.training.fitting import Fitting, Watch, finish

CHUNK = 256  # tokens read in one forward


class LoadedNetwork(NamedTuple):
    """A network without the playground's hooks, as loaded by `engine.load.load`; in float32 for training."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    facts: Facts


@dataclass
class VariantOrder:
    """A variant to train: the method, the base model, and the name in the catalogue.

    Raises Refusal if the name is invalid or taken.
    """

    method: Variant
    base: str
    name: str = ""  # default: base and method
    seed: int = 0

    def __post_init__(self) -> None:
        self.name = self.name or re.sub(r"[^\w.-]+", "-", f"{Path(self.base).name}-{self.method.adjective}")
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise Refusal(
                f"{self.name!r} cannot be the name of a model: use letters, digits, dots and hyphens.", "name"
            )
        if self.name in {entry.name for entry in BUNDLED}:
            raise Refusal(f"{self.name} is the name of a bundled model: choose another --name.", "name")
        if self.folder.exists():
            raise Refusal(
                f"A model named {self.name} exists already: choose another --name, or delete {self.folder}.", "name"
            )

    @property
    def folder(self) -> Path:
        return made_models() / self.name

    @property
    def title(self) -> str:
        base = next((entry.title for entry in entries() if entry.name == self.base), Path(self.base).name)
        return f"{base}, {self.method.adjective}"


def make_variant(
    order: VariantOrder, base: LoadedNetwork, texts: list[str], watch: Watch
) -> dict[str, Any]:
    """Train and save a variant, and return its card. An unfinished model leaves no files.

    `watch` receives the events of the training. Raises Refusal if the weights are not float32, or cannot be saved.
    """
    # a quantised tensor may call itself float32
    if is_quantised(base.network) or any(part.dtype != torch.float32 for part in base.network.parameters()):
        raise Refusal(
            f"The weights of {order.base} are not float32, so they cannot be trained: choose a model that is not "
            "quantised.",
            "model",
        )
    events = []
    for event in order.method.make(base.network, base.tokenizer(texts)["input_ids"], order.seed):
        events.append(event)
        watch(event)
    card = _card(order, base, texts, events)
    _save(order.folder, base, card)
    return card


def _card(order: VariantOrder, base: LoadedNetwork, texts: list[str], events: list[Figure | Note]) -> dict[str, Any]:
    """Metadata for the catalogue, and everything needed to reproduce the model."""
    shown = {
        "name": order.name,
        "title": order.title,
        "parameters": f"{base.network.num_parameters() / 1e6:.1f} M",
        "draft": partner(order.base),
        "note": f"Made on this machine from {order.base}.",
    }
    origin = {
        "method": order.method.name,
        "knobs": order.method.values(),
        "base": order.base,
        "base_revision": base.facts.revision,
        "seed": order.seed,
        "texts": {"count": len(texts), "sha256": sha256("\0".join(texts).encode()).hexdigest()},
    }
    curve = [{"x": event.data["x"], **event.data["series"]} for event in events if isinstance(event, Figure)]
    return {**shown, **origin, "curve": curve, "notes": [event.text for event in events if isinstance(event, Note)]}


def _save(folder: Path, base: LoadedNetwork, card: dict[str, Any]) -> None:
    """Write to a temporary folder and rename it, so that the catalogue never sees a partial model."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent.parent, prefix="unfinished-") as unfinished:
            place = Path(unfinished) / folder.name
            base.network.save_pretrained(place)
            base.tokenizer.save_pretrained(place)
            (place / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
            place.rename(folder)
    except (OSError, SafetensorError) as reason:
        raise Refusal(
            f"The model cannot be saved in {folder} ({getattr(reason, 'strerror', None) or first_sentence(reason)}):"
            " free some space, or set PLAYGROUND_HOME to another folder.",
            "name",
        ) from None


def fit(cls: type[Strategy], model: Model, texts: list[str], progress: Progress = unseen) -> dict[str, Any]:
    """Fit a strategy's knobs to a model, and return them by name.

    Raises Refusal if the strategy has none to fit, or if the texts are too few.
    """
    check_fits(cls)
    if model.fills:
        raise Refusal(
            f"{model.name} is a diffusion model and does not read from left to right: choose an autoregressive model.",
            "model",
        )
    known = {knob.name: knob for knob in cls.knobs()}
    found = cls.fit(
        readings(model, [model.tokens.encode(text) for text in texts], progress, issubclass(cls, ReadsQueries))
    )
    return {name: known[name].read(value) for name, value in found.items()}


def train(cls: type[Strategy], draft: Model | None, fitting: Fitting) -> dict[str, Tensor]:
    """Train the weights of a strategy on rollouts of a draft model, and return them by name. Raises Refusal.

    The target continues the beginnings of the texts, or answers questions of the small world if there are no texts:
    once sampled, and once greedily. Finished rollouts are kept beside the checkpoint until the end.
    """
    target, seed, kept = fitting.model, fitting.seed, fitting.checkpoint
    prompts = openings(target, fitting.texts) if fitting.texts else world_prompts(target, seed)
    models = Models(target, draft)
    sampled, best = (
        list(rollouts(models, prompts, Sampling(seed, drawn), kept, fitting.progress)) for drawn in (True, False)
    )
    weights = finish(cls.train(sampled, best, seed), fitting.watch)
    delete_files(kept)
    return weights


def check_fits(cls: type[Strategy]) -> None:
    """Raise Refusal if the strategy has nothing to fit."""
    if not hasattr(cls, "fit"):
        raise Refusal(f"{cls.name} has no knobs that are fitted to a model: set its knobs by hand.", cls.name)


def readings(
    model: Model, texts: list[list[int]], progress: Progress = unseen, asks: bool = False
) -> Iterator[TokenReading]:
    """Read all texts, as token ids, once. A text longer than the model's context is read in independent windows.

    With `asks`, the readings contain the query states of their positions.
    """
    for number, ids in enumerate(texts):
        progress(number / len(texts), f"Reading text {number + 1} of {len(texts)}")
        for start in range(0, len(ids), model.context):
            yield from _read(model, ids[start:start + model.context], asks)


def _read(model: Model, ids: list[int], asks: bool) -> Iterator[TokenReading]:
    """Read one window, with one forward per chunk. The first token is not predicted."""
    store, queries = model.new_store(), {}
    if asks:
        store.on_queries = lambda layer, rows, positions: queries.update({layer: rows})
    for start in range(0, len(ids) - 1, CHUNK):
        chunk, following = ids[start:start + CHUNK], ids[start + 1:start + 1 + CHUNK]
        (rows,), _ = model.forward([ForwardInput(store, chunk, list(range(-1, len(chunk) - 1)))])
        store.commit(len(chunk) - 1)
        yield TokenReading(
            torch.tensor(following, device=rows.device), rows[: len(following)], dict(queries) if asks else None
        )
