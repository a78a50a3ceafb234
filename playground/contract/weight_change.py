"""Changes of weights: what the linear layers of a lane's model become, and what their weights then take.

A lane names them in its weights, as in "wanda:sparsity=0.5 + rtn:bits=4". Each is made once for a model and kept on the
disk (`training.weights`); tensors that it leaves alone are those of the loaded model.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from playground.contract.knobs import knob
from playground.contract.registry import find, made
from playground.contract.variant import Variant
from playground.errors import Refusal
from playground.request_limits import quoted
from playground.weight_changes import WeightChanges, check_weights

if TYPE_CHECKING:
    from playground.engine.weights.linear_blocks import LinearBlocks

OWN_TEXTS = re.compile(r"[0-9a-f]{8}|")  # a digest of calibration texts, empty for the bundled ones


class ChangedWeight(NamedTuple):
    """weight: [out, in]. bits: what each weight takes when it is stored, with scales, indices and factors."""

    weight: Tensor
    bits: float


class WeightChange(Variant):
    """Gives linear layers other weights."""

    reads_inputs: ClassVar[bool] = False  # of layers, on calibration texts

    def changed(self, weight: Tensor, inputs: Tensor | None) -> ChangedWeight:
        """What the weights [out, in] of one layer become. `inputs` [n, in] are what it reads, None unless
        `reads_inputs`. Raises Refusal.
        """
        raise NotImplementedError

    def change(self, blocks: LinearBlocks) -> None:
        """Change all layers, block by block; the inputs of each block come from those before it as they have become.
        """
        for block in blocks:
            inputs = block.inputs() if self.reads_inputs else {}
            for name in block.layers:
                if self.reads_inputs and name not in inputs:
                    continue  # an expert that no token was sent to
                blocks.put(name, *self.changed(blocks.weight(name), inputs.get(name)))


class CalibratedChange(WeightChange):
    """A change that reads what its layers read."""

    reads_inputs = True

    samples: int = knob(32, 1, 256, step=1, help="calibration texts")
    calibration: str = knob("", help="digest of your own calibration texts, as `variant` prints it; empty: the bundled "
                                     "questions")

    def check(self) -> None:
        if not OWN_TEXTS.fullmatch(self.calibration):
            raise Refusal(f"calibration is the digest that `variant {self.name} --texts FILE` prints, not "
                          f"{quoted(self.calibration)}.", "calibration")


def read_change(text: str) -> WeightChange:
    """The change that "NAME:knob=value,knob=value" names; raises Refusal."""
    name, _, settings = text.partition(":")
    cls = find(name)
    if not issubclass(cls, WeightChange):
        raise Refusal(f"{name} does not change the weights of a lane: choose another change.", "weights")
    knobs = dict(setting.partition("=")[::2] for setting in settings.split(",") if setting)
    return made(cls, knobs)


def written(change: WeightChange) -> str:
    """The text of a change with the knobs that differ from their defaults."""
    settings = [f"{each.name}={getattr(change, each.name)}" for each in change.knobs()
                if getattr(change, each.name) != each.default]
    return f"{change.name}:{','.join(settings)}" if settings else change.name


def check_changes(weights: str) -> None:
    """Raise Refusal for what is neither empty nor weights that a lane can have, and for knobs that a change of layers
    has not.
    """
    check_weights(weights)
    for text in WeightChanges.read(weights).layers:
        read_change(text)


def each_change(layers: tuple[str, ...]) -> Iterator[tuple[str, WeightChange]]:
    """Changes in order, each with the text of all up to it."""
    for count, text in enumerate(layers, 1):
        yield " + ".join(written(read_change(each)) for each in layers[:count]), read_change(text)
