"""The parts of a fused layer: a norm, linear layers that are one product, and the feed-forward network of two products.
"""
from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

ONEDNN_FROM = 2 ** 16  # weights of a layer; below, the setup of oneDNN for each number of rows costs more than it gains
# oneDNN, and torch's layer over it, each keep about 0.3 MB of code for every layer shape and number of rows. Their own
# limit of 1024 lets half a gigabyte grow over some hundreds of prompts. 128 hold a dozen numbers of rows for two
# networks, and code that was dropped is made again in 0.5 ms. Both are read before the first product.
for limit in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(limit, "128")


class RMSNorm:
    """RMS norm in half the calls of torch's own: squares are summed instead of averaged, and the weight is scaled."""

    def __init__(self, weight: Tensor, epsilon: float):
        self.weight, self.epsilon = weight, epsilon
        self._scaled = weight * weight.shape[0] ** 0.5
        self._floor = torch.tensor(epsilon, dtype=weight.dtype)
        # on a GPU torch's norm is one kernel; half precision needs float32 squares
        self._native = weight.device.type != "cpu" or weight.dtype in (torch.float16, torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:  # the library computes the norm in float32
            return self.weight * rms_norm(x.float(), self.weight.shape, None, self.epsilon).double()
        if self._native:
            return rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return (x * self._scaled).mul_(torch.addcmul(self._floor, x, x).sum(-1, keepdim=True).rsqrt_())


@dataclass
class FusedLinear:
    """Several linear layers with the same input as one product.

    Large ones use oneDNN on a CPU. With the weights in oneDNN's layout, four rows take hardly longer than one, and one
    row takes less time than with torch's own product.
    """

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *layers: nn.Linear) -> FusedLinear:
        """The layers' weights become views into one tensor, so they are not duplicated."""
        weight = _joined([layer.weight.data for layer in layers])
        for layer, part in zip(layers, weight.split([layer.out_features for layer in layers])):
            layer.weight.data = part
        biases = [layer.bias for layer in layers]
        return cls(weight, torch.cat([bias.data for bias in biases]) if biases[0] is not None else None)

    def __post_init__(self) -> None:
        self._reordered = self.weight

    def reorder(self) -> None:
        """Make a copy of the weights in oneDNN's layout; the weights must not change from now on."""
        if self._uses_onednn:
            # 16 is the expected number of rows; others work too
            self._reordered = torch.ops.mkldnn._reorder_linear_weight(self.weight, 16)

    def replaced(self, weight: Tensor | None) -> FusedLinear:
        """The same with another weight, which must not change from now on; itself for None."""
        if weight is None:
            return self
        new = FusedLinear(weight.to(self.weight), self.bias)
        new.reorder()
        return new

    def __call__(self, x: Tensor) -> Tensor:
        if self._uses_onednn:
            return torch.ops.mkldnn._linear_pointwise(x, self._reordered, self.bias, "none", [], "")
        return linear(x, self.weight, self.bias)

    @cached_property
    def _uses_onednn(self) -> bool:
        weight, onednn = self.weight, torch.ops.mkldnn
        available = torch.backends.mkldnn.is_available() and hasattr(onednn, "_linear_pointwise")
        if not available or weight.device.type != "cpu" or weight.numel() < ONEDNN_FROM:
            return False
        return weight.dtype == torch.float32 or weight.dtype == torch.bfloat16 and onednn._is_mkldnn_bf16_supported()


def _joined(weights: list[Tensor]) -> Tensor:
    """Weights one above the other. Those that are views into one joined matrix, of a network that shares its tensors
    with another, are not copied.
    """
    first, rows = weights[0], sum(map(len, weights))
    at = [(weight.untyped_storage().data_ptr(), weight.storage_offset() + weight.numel()) for weight in weights]
    follows = all(own.storage_offset() == end and place == at[0][0] and own.is_contiguous()
                  for own, (_, end), (place, _) in zip(weights[1:], at, at[1:]))
    if follows and first.is_contiguous():
        return first.as_strided((rows, first.shape[1]), first.stride())
    return torch.cat(weights)


@dataclass
class FeedForward:
    """A gated feed-forward network over hidden states [n, d] after the norm."""

    gate_up: FusedLinear
    down: FusedLinear

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.activations(hidden))

    def activations(self, hidden: Tensor) -> Tensor:
        """The input of the output projection, [n, channels]."""
        gate, up = self.gate_up(hidden).chunk(2, -1)
        return silu(gate) * up

    @property
    def weights(self) -> int:
        return self.gate_up.weight.numel() + self.down.weight.numel()

    @property
    def channels(self) -> int:
        """Width between the projections."""
        return self.down.weight.shape[1]

    def narrowed(self, channels: Tensor) -> FeedForward:
        """A copy with only these channels [k]."""
        both = torch.cat([channels, channels + self.channels])
        bias = self.gate_up.bias
        return FeedForward(
            FusedLinear(self.gate_up.weight[both], None if bias is None else bias[both]),
            FusedLinear(self.down.weight[:, channels].contiguous(), self.down.bias),
        )
