"""Changes the weights of a loaded model, for a lane or a whole run, or reads the changes from the disk.

The new model shares every tensor with the loaded one that no change touches.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from playground.contract.weight_change import CalibratedChange, WeightChange, each_change
from playground.engine.checkpoint.hub_files import Progress, unseen
from playground.engine.loading.loaded_model import loaded_model
from playground.engine.model import Model
from playground.engine.weights.linear_blocks import LinearBlocks, linear_layers
from playground.engine.weights.shared_network import sharing
from playground.errors import Refusal
from playground.training.calibration import windows, world_texts
from playground.training.weights.changed_weights import ChangedWeights, digest_of, find, key_of, save
from playground.training.weights.weight_report import weight_report

TASKS = 10  # of the small world
HELD_OUT = 3  # questions of each task that changes are judged on, in wordings that they are not calibrated on


def changed_model(base: Model, layers: Sequence[str], progress: Progress = unseen) -> Model:
    """The model with changes made to its linear layers, in this order; raises Refusal."""
    made = WeightMaker(base, progress).make(layers)
    network = sharing(base.name, base.network)
    _put(network, made)
    changed = loaded_model(network, base.tokenizer, base.name, base.revision, " + ".join(layers))
    changed.weights_card = made.card
    return changed


def digest_of_texts(texts: Sequence[str]) -> str:
    """What the knob `calibration` of a change calls these texts."""
    return sha256("\0".join(texts).encode()).hexdigest()[:8]


@dataclass
class WeightMaker:
    """Makes changed weights of one model. texts: a person's own, to calibrate on."""

    base: Model
    progress: Progress = unseen
    texts: Sequence[str] = ()
    _source: str = field(default="", init=False)

    def make(self, layers: Sequence[str]) -> ChangedWeights:
        """The weights after all changes; those that were made before are read from the disk. Raises Refusal."""
        if self.base.fills:
            raise Refusal(f"{self.base.name} fills masked positions, and changed weights are judged on text that "
                          "continues: choose an autoregressive model.", "model")
        network = sharing(self.base.name, self.base.network)
        linear_layers(network)  # refuses a network without any
        self._source, bits, read = digest_of(network), dict[str, float](), list[str]()
        for text, change in each_change(tuple(layers)):
            read += [self._calibrated_on(change)]
            key = key_of(self._source, text, [about for about in read if about], self._held_out)
            made = find(key)
            if made is None:
                made = self._made(text, change, network, bits)
                save(key, made)
            else:
                _put(network, made)
            bits = {name: layer["bits"] for name, layer in made.card["layers"].items()}
        return made

    def _made(self, text: str, change: WeightChange, network: PreTrainedModel, bits: dict[str, float]
              ) -> ChangedWeights:
        """Change the network, and measure what that costs."""
        blocks = LinearBlocks(network, self._calibration(change), self._report, bits)
        change.change(blocks)
        self.progress(0.9, "Measuring on held-out texts")
        original = sharing(self.base.name, self.base.network)
        card = {"weights": text, "model": self.base.name, "revision": self.base.revision,
                "calibrated on": _described(change, blocks.texts),
                **weight_report(original, network, blocks.bits, self._held_out)}
        changed = {name: layer.weight for name, layer in blocks.layers.items() if not card["layers"][name]["same"]}
        self.progress(1.0, "")
        return ChangedWeights(card, changed)

    @cached_property
    def _held_out(self) -> list[list[int]]:
        return world_texts(self.base, 1, HELD_OUT, held_out=True)

    def _report(self, share: float, text: str) -> None:
        self.progress(0.9 * share, text)

    def _calibrated_on(self, change: WeightChange) -> str:
        """What identifies the texts that a change is calibrated on; empty for one that reads none."""
        if not isinstance(change, CalibratedChange):
            return ""
        return change.calibration or sha256(repr(self._bundled(change)).encode()).hexdigest()

    def _calibration(self, change: WeightChange) -> list[list[int]]:
        if not isinstance(change, CalibratedChange):
            return []
        if not change.calibration:
            return self._bundled(change)
        if change.calibration != digest_of_texts(self.texts):
            raise Refusal(
                f"{change.name} with calibration={change.calibration} was calibrated on texts that are not here: run "
                f"`python -m playground variant {change.name} --texts FILE` with these texts, or leave calibration "
                "out.", "weights")
        found = windows(self.base, self.texts)[:change.samples]
        if not found:
            raise Refusal("The texts have fewer than two tokens each: name files with longer texts.", "texts")
        return found

    def _bundled(self, change: CalibratedChange) -> list[list[int]]:
        return world_texts(self.base, 0, -(-change.samples // TASKS))[:change.samples]


def _put(network: PreTrainedModel, made: ChangedWeights) -> None:
    """Give a network the weights that were made for it."""
    layers = linear_layers(network)
    for name, weight in made.tensors.items():
        layers[name].weight = nn.Parameter(weight.to(layers[name].weight), requires_grad=False)


def _described(change: WeightChange, texts: list[list[int]]) -> str:
    """What a change was calibrated on, for people."""
    if not isinstance(change, CalibratedChange):
        return "nothing"
    of = f"your own texts {change.calibration}" if change.calibration else "questions of the small world"
    return f"{sum(map(len, texts))} tokens of {of}"


def summary(card: dict[str, Any]) -> str:
    """A card in one line, for people."""
    size = f"{card['bytes'] / 1e6:.2f} MB of {card['bytes before'] / 1e6:.2f} MB"
    perplexity = f"perplexity {card['perplexity']:.3f} (before: {card['perplexity before']:.3f})"
    return (f"{card['bits per weight']:.2f} bits per weight, {size}; KL {card['KL']:.4f} nats per token, {perplexity}, "
            f"calibrated on {card['calibrated on']}")
