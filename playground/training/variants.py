"""What is learnt before any text is written: models made from others, knobs fitted to a model, and weights fitted to a
pair of models.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from playground.algorithms.sampling.token_readings import TokenReading
from playground.contract import Strategy, Variant
from playground.engine.catalogue import BUNDLED, CARD, entries, made_models, partner
from playground.engine.forward_input import ForwardInput
from playground.engine.hub_files import Progress, first_sentence, unseen
from playground.engine.load import Facts
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Figure, Note
from playground.training.draft_rollouts import Chance, guesses, openings, world_prompts

if TYPE_CHECKING:
    from playground.decoding.session import Models

CHUNK = 256  # tokens read in one forward


class LoadedNetwork(NamedTuple):
    """A model without our seams, as `engine.load.load` gives it; to be trained it has to be in float32."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    facts: Facts


@dataclass
class VariantOrder:
    """A variant to be made: how, of which model, and under which name it joins the catalogue. Raises Refusal for a name
    it cannot have.
    """

    method: Variant
    base: str
    name: str = ""  # of the base and the method where none is given
    seed: int = 0

    def __post_init__(self) -> None:
        self.name = self.name or re.sub(r"[^\w.-]+", "-", f"{Path(self.base).name}-{self.method.adjective}")
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise Refusal(
                f"{self.name!r} cannot be the name of a model: use letters, digits, dots and hyphens.", "name"
            )
        if self.name in {entry.name for entry in BUNDLED}:
            raise Refusal(f"{self.name} is a model that comes with the project: choose another --name.", "name")
        if self.folder.exists():
            raise Refusal(
                f"There is a model named {self.name} already: choose another --name, or delete {self.folder}.", "name"
            )

    @property
    def folder(self) -> Path:
        return made_models() / self.name

    @property
    def title(self) -> str:
        base = next((entry.title for entry in entries() if entry.name == self.base), Path(self.base).name)
        return f"{base}, {self.method.adjective}"


def make_variant(
    order: VariantOrder, base: LoadedNetwork, texts: list[str], watch: Callable[[Figure | Note], None]
) -> dict[str, Any]:
    """Train, save, and return the card of the new model; nothing is left of one that was not finished. Raises Refusal.
    """
    if any(weights.dtype != torch.float32 for weights in base.network.parameters()):
        raise Refusal(
            f"The weights of {order.base} are not plain float32 numbers, so they cannot be trained: choose a model that is not quantised.",
            "model",
        )
    told = []
    for event in order.method.make(base.network, base.tokenizer(texts)["input_ids"], order.seed):
        told.append(event)
        watch(event)
    card = _card(order, base, texts, told)
    _save(order.folder, base, card)
    return card


def _card(order: VariantOrder, base: LoadedNetwork, texts: list[str], told: list[Figure | Note]) -> dict[str, Any]:
    """What the catalogue shows, and all it takes to make the model again."""
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
    curve = [{"x": event.data["x"], **event.data["series"]} for event in told if isinstance(event, Figure)]
    return {**shown, **origin, "curve": curve, "notes": [event.text for event in told if isinstance(event, Note)]}


def _save(folder: Path, base: LoadedNetwork, card: dict[str, Any]) -> None:
    """Write beside the place and move there at once, so that the catalogue never sees half a model."""
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
            f"The model cannot be saved in {folder} ({getattr(reason, 'strerror', None) or first_sentence(reason)}): free some space, "
            "or set PLAYGROUND_HOME to another folder.",
            "name",
        ) from None


def fit(cls: type[Strategy], model: Model, texts: list[str], progress: Progress = unseen) -> dict[str, Any]:
    """Knobs of a strategy fitted to a model, by name; raises Refusal where the strategy has none to fit or the texts
    say too little.
    """
    check_fits(cls)
    if model.fills:
        raise Refusal(
            f"{model.name} fills a canvas and does not read text from left to right: choose a language model.", "model"
        )
    known = {knob.name: knob for knob in cls.knobs()}
    found = cls.fit(
        readings(model, [model.tokens.encode(text) for text in texts], progress, getattr(cls, "asks", False))
    )
    return {name: known[name].read(value) for name, value in found.items()}


def train(cls: type[Strategy], models: Models, texts: list[str], seed: int, watch: Callable[[Figure | Note], None],
          progress: Progress = unseen) -> dict[str, Tensor]:
    """Weights of a strategy that learns from what the draft guesses, by name; raises Refusal.

    The target goes on from the beginnings of the texts, or answers questions of the small world where there are none:
    once by chance, and once with its best tokens.
    """
    prompts = openings(models.target, texts) if texts else world_prompts(models.target, seed)
    drawn, best = (list(guesses(models, prompts, Chance(seed, by_chance), progress)) for by_chance in (True, False))
    told = cls.train(drawn, best, seed)
    while True:
        try:
            watch(next(told))
        except StopIteration as end:
            return end.value


def check_fits(cls: type[Strategy]) -> None:
    """Raise Refusal for a strategy that has nothing to fit."""
    if not hasattr(cls, "fit"):
        raise Refusal(f"{cls.name} has no knob that is fitted to a model: set its knobs by hand.", cls.name)


def readings(
    model: Model, texts: list[list[int]], progress: Progress = unseen, asks: bool = False
) -> Iterator[TokenReading]:
    """All texts, as ids, read once; a text longer than the model's context is read in windows that know nothing of each
    other.

    With `asks` the readings bring along what their rows look for.
    """
    for number, ids in enumerate(texts):
        progress(number / len(texts), f"Reading text {number + 1} of {len(texts)}")
        for start in range(0, len(ids), model.context):
            yield from _read(model, ids[start:start + model.context], asks)


def _read(model: Model, ids: list[int], asks: bool) -> Iterator[TokenReading]:
    """One window, a forward for every chunk; no row comes before its first token."""
    store, queries = model.new_store(), {}
    if asks:
        store.ask = lambda layer, rows, positions: queries.update({layer: rows})
    for start in range(0, len(ids) - 1, CHUNK):
        chunk, following = ids[start:start + CHUNK], ids[start + 1:start + 1 + CHUNK]
        (rows,), _ = model.forward([ForwardInput(store, chunk, list(range(-1, len(chunk) - 1)))])
        store.keep(len(chunk) - 1)
        yield TokenReading(
            torch.tensor(following, device=rows.device), rows[: len(following)], dict(queries) if asks else None
        )
