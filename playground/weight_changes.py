"""The weights of a lane: the changes to the loaded model, by name and in order, such as "nf4 + adapter:FOLDER" or
"wanda:sparsity=0.5 + rtn:bits=4".

A quantisation comes first, then adapters, then changes of linear layers, which are strategies of the room
`strategies/weights`, each in a file of its name. Imports no torch, since pages, links and the command line carry these
texts; what a change's knobs may be is checked by the contract (`contract.weight_change`).
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from playground.errors import Refusal

QUANTIZED = ("int8", "nf4", "fp4")
ADAPTER = "adapter:"
JOINT = " + "  # between changes, and between the name of a model and that of an adapter
MOST = 5  # changes of one lane
LONGEST = 1000  # characters of all
ROOM = Path(__file__).parents[1] / "strategies" / "weights"
KNOBS = re.compile(r"\w{1,40}=[^\s,=+]{1,40}(,\w{1,40}=[^\s,=+]{1,40}){0,15}")


@dataclass(frozen=True)
class WeightChanges:
    """quantization: of the base's weights, "none" for none. adapters: folders or hub ids, added in this order.
    layers: changes of linear layers, each as "NAME" or "NAME:knob=value,knob=value", made in this order.
    """

    quantization: str = "none"
    adapters: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> WeightChanges:
        """The changes that a text names; empty for none. Raises Refusal."""
        if not isinstance(text, str) or len(text) > LONGEST or text.count(JOINT) >= MOST:
            raise _unknown(text)
        parts = [part.strip() for part in text.split(JOINT)] if text else []
        quantization = parts.pop(0) if parts and parts[0] in ("none", *QUANTIZED) else "none"
        if any(part in QUANTIZED for part in parts):
            raise Refusal("Weights are quantised before anything else is done to them: name the quantisation first.",
                          "weights")
        adapters = [part for part in parts if part.startswith(ADAPTER)]
        layers = [part for part in parts if _is_layer_change(part)]
        if len(adapters) + len(layers) < len(parts):
            raise _unknown(text)
        _check_order(quantization, adapters, layers, parts)
        return cls(quantization, tuple(part.removeprefix(ADAPTER).strip() for part in adapters), tuple(layers))

    @classmethod
    def of_model(cls, quantization: str) -> WeightChanges:
        """The same for the quantisation of a whole run; one that does not exist is left to `Loading` to refuse."""
        changes = isinstance(quantization, str) and (ADAPTER in quantization or _is_layer_change(
            quantization.split(JOINT)[-1].strip()))
        return cls.read(quantization) if changes else cls(quantization)

    @property
    def loaded(self) -> str:
        """The text of what a loader does itself: quantisation and adapters, without changes of layers; empty for
        nothing.
        """
        packed = [] if self.quantization == "none" else [self.quantization]
        return JOINT.join([*packed, *(ADAPTER + adapter for adapter in self.adapters)])

    def named(self, model: str) -> str:
        """The name of a model with the adapters."""
        return JOINT.join((model, *self.adapters))


@cache
def layer_changes() -> tuple[str, ...]:
    """Names of the changes of linear layers that there are, sorted."""
    return tuple(sorted(file.stem for file in ROOM.glob("[a-z]*.py")))


def check_weights(text: str) -> None:
    """Raise Refusal for what is neither empty nor weights that a lane can have."""
    if text == "none":
        raise _unknown(text)
    WeightChanges.read(text)


def are_weights(text: str) -> bool:
    """Whether a text names weights that a lane can have; false for an empty one."""
    try:
        check_weights(text)
    except Refusal:
        return False
    return bool(text)


def adds_adapter(text: str) -> bool:
    """Whether weights contain an adapter, which has to be found and read."""
    return ADAPTER in text


def _is_layer_change(part: str) -> bool:
    name, colon, knobs = part.partition(":")
    return name in layer_changes() and (not colon or bool(KNOBS.fullmatch(knobs)))


def _check_order(quantization: str, adapters: list[str], layers: list[str], parts: list[str]) -> None:
    if not all(part.removeprefix(ADAPTER).strip() for part in adapters):
        raise Refusal(f"The weights {ADAPTER} lack the adapter: name its folder or hub id, as in {ADAPTER}FOLDER.",
                      "weights")
    if parts != adapters + layers:
        raise Refusal(f"An adapter is added to the weights that it was trained on: name it before {layers[0]}.",
                      "weights")
    if layers and quantization != "none":
        raise Refusal(f"{layers[0].partition(':')[0]} changes weights that are not quantised yet: leave out "
                      f"{quantization}.", "weights")


def _unknown(text: object) -> Refusal:
    known = ", ".join(QUANTIZED)
    said = repr(text)[:60]
    return Refusal(f"The weights of a lane are one of {known}, {ADAPTER}FOLDER, or both as nf4{JOINT}{ADAPTER}FOLDER, "
                   f"or changes of layers such as rtn:bits=4 ({', '.join(layer_changes())}), or empty, not {said}.",
                   "weights")
