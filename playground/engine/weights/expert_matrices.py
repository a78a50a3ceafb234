"""The matrices of experts, which a mixture of experts keeps as slices of one tensor for all experts of a layer.

They are read and replaced one by one, as if each belonged to a linear layer of its own.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

GATE_UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(eq=False)
class Experts:
    """The experts of one layer. module: of the transformers library, with matrices [experts, out, in]."""

    module: Any
    _own: set[str] = field(default_factory=set)  # tensors that are a copy, which no other network shares

    def __len__(self) -> int:
        return getattr(self.module, DOWN).shape[0]

    def put(self, part: str, index: int, weight: Tensor) -> None:
        """Give one expert another matrix. The tensor of all of them is copied before the first one."""
        if part not in self._own:
            whole = getattr(self.module, part).detach().clone()
            setattr(self.module, part, nn.Parameter(whole, requires_grad=False))
            self._own.add(part)
        getattr(self.module, part)[index] = weight

    def activations(self, gate_up: Tensor, rows: Tensor) -> Tensor:
        """What the down projection of an expert with this matrix [2 k, d] reads, [n, k], of rows [n, d]."""
        return self.module._apply_gate(linear(rows.to(gate_up), gate_up))

    def apply(self, gate_up: Tensor, down: Tensor, rows: Tensor) -> Tensor:
        """What an expert with these matrices makes of rows, both [n, d]."""
        return linear(self.activations(gate_up, rows), down)


@dataclass(eq=False)
class ExpertMatrix:
    """One matrix of one expert, in place of a linear layer."""

    experts: Experts
    part: str
    index: int

    @property
    def weight(self) -> Tensor:
        """[out, in]"""
        return getattr(self.experts.module, self.part)[self.index]

    @weight.setter
    def weight(self, new: Tensor) -> None:
        self.experts.put(self.part, self.index, new)

    def among(self, whole: Tensor, weight: Tensor) -> Tensor:
        """The matrices of all experts [experts, out, in] with this one in its place."""
        return torch.cat([whole[:self.index], weight.to(whole)[None], whole[self.index + 1:]])

    def watch(self, receive: Callable[[Tensor], None]) -> RemovableHandle:
        """Have each call's inputs [n, in] of this matrix received, if the call sends it any rows."""
        return self.experts.module.register_forward_pre_hook(lambda module, given: self._read(receive, *given[:2]))

    def _read(self, receive: Callable[[Tensor], None], hidden: Tensor, chosen: Tensor) -> None:
        rows = hidden.flatten(0, -2)[(chosen == self.index).any(-1)].detach()
        if self.part == DOWN:
            gate_up = getattr(self.experts.module, GATE_UP)[self.index]
            rows = self.experts.activations(gate_up, rows)
        if len(rows):
            receive(rows)


class RouterReading(NamedTuple):
    """What the router of a block did with rows that it read, and the experts it chooses from."""

    experts: Experts
    names: list[tuple[str, str]]  # of the two matrices of each expert
    inputs: Tensor  # [n, d]
    probabilities: Tensor  # [n, experts], over all of them
    chosen: Tensor  # [n, used]
    gates: Tensor  # [n, used], as the outputs of the chosen experts are weighted


def expert_matrices(network: nn.Module) -> dict[str, ExpertMatrix]:
    """The matrices of all experts of a network, by name, such as layers.0.mlp.experts.3.down_proj."""
    return {f"{name}.{index}.{part}": ExpertMatrix(experts, part, index)
            for name, experts in _groups(network) for index in range(len(experts)) for part in (GATE_UP, DOWN)}


def _groups(network: nn.Module) -> Iterator[tuple[str, Experts]]:
    for name, module in network.named_modules():
        parts = [getattr(module, part, None) for part in (GATE_UP, DOWN)]
        plain = getattr(module, "has_gate", False) and not (module.is_transposed or module.has_bias)
        if plain and all(isinstance(part, Tensor) and part.dim() == 3 for part in parts):
            yield name, Experts(module)


def routed_rows(module: nn.Module, matrices: Mapping[str, ExpertMatrix], run: Callable[[], object]) -> RouterReading:
    """What the router of a decoder layer does while `run` runs the layer. matrices: of its experts, by name."""
    router = next(part for part in module.modules() if type(part).__name__.endswith("TopKRouter"))
    found: list[tuple[Tensor, ...]] = []

    def note(router: nn.Module, given: tuple[Tensor, ...], out: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, gates, chosen = out
        found.append((given[0].flatten(0, -2), logits.float().softmax(-1), chosen, gates))

    handle = router.register_forward_hook(note)
    try:
        run()
    finally:
        handle.remove()
    names = list(matrices)
    return RouterReading(next(iter(matrices.values())).experts, list(zip(names[::2], names[1::2])),
                      *(torch.cat(parts) for parts in zip(*found)))
