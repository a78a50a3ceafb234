"""The weights of a lane: the changes to the loaded model, by name and in order, such as "nf4 + adapter:FOLDER".

Imports no torch, since pages, links and the command line carry these texts.
"""
from __future__ import annotations

from dataclasses import dataclass

from playground.errors import Refusal

QUANTIZED = ("int8", "nf4", "fp4")
ADAPTER = "adapter:"
JOINT = " + "  # between changes, and between the name of a model and that of an adapter
MOST = 5  # changes of one lane
LONGEST = 1000  # characters of all


@dataclass(frozen=True)
class WeightChanges:
    """quantization: of the base's weights, "none" for none. adapters: folders or hub ids, added in this order."""

    quantization: str = "none"
    adapters: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> WeightChanges:
        """The changes that a text names; empty for none. Raises Refusal."""
        if not isinstance(text, str) or len(text) > LONGEST or text.count(JOINT) >= MOST:
            raise _unknown(text)
        parts = [part.strip() for part in text.split(JOINT)] if text else []
        quantization = parts.pop(0) if parts and parts[0] in ("none", *QUANTIZED) else "none"
        if any(part in QUANTIZED for part in parts):
            raise Refusal("Weights are quantised before an adapter is added: name the quantisation first.", "weights")
        adapters = tuple(part.removeprefix(ADAPTER).strip() for part in parts)
        if not all(part.startswith(ADAPTER) for part in parts):
            raise _unknown(text)
        if not all(adapters):
            raise Refusal(f"The weights {ADAPTER} lack the adapter: name its folder or hub id, as in "
                          f"{ADAPTER}FOLDER.", "weights")
        return cls(quantization, adapters)

    @classmethod
    def of_model(cls, quantization: str) -> WeightChanges:
        """The same for the quantisation of a whole run; one that does not exist is left to `Loading` to refuse."""
        has_adapter = isinstance(quantization, str) and ADAPTER in quantization
        return cls.read(quantization) if has_adapter else cls(quantization)

    def named(self, model: str) -> str:
        """The name of a model with the adapters."""
        return JOINT.join((model, *self.adapters))


def check_weights(text: str) -> None:
    """Raise Refusal for what is neither empty nor weights that a lane can have."""
    if text == "none":
        raise _unknown(text)
    WeightChanges.read(text)


def adds_adapter(text: str) -> bool:
    """Whether weights contain an adapter, which has to be found and read."""
    return ADAPTER in text


def _unknown(text: object) -> Refusal:
    known = ", ".join(QUANTIZED)
    said = repr(text)[:60]
    return Refusal(f"The weights of a lane are one of {known}, {ADAPTER}FOLDER, or both as nf4{JOINT}{ADAPTER}FOLDER, "
                   f"or empty, not {said}.", "weights")
