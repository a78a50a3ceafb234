"""Forward of a very small network for a few rows, in numpy.

A draft model mostly decodes one row at a time. In most of the hundred calls that takes, the overhead of torch exceeds
the computation. numpy has less overhead, so it does everything except matrix products and attention. The products use
torch's own kernels, because oneDNN has ten microseconds of overhead per call. Weights and KV cache are those of
`fused_llama.py`; the logits agree up to rounding.
"""
from __future__ import annotations

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from playground.engine.fused_llama import FusedLayer, FusedLinear, FusedLlama, RMSNorm
from playground.engine.hooks import Call, attend_all

MAX_WEIGHTS = 2 ** 21  # of a network up to which it is faster
MAX_ROWS = 4  # of a forward up to which it is faster


class NumpyRMSNorm:
    """RMS norm of rows [..., d]. Squares are summed instead of averaged, and the weight is scaled."""

    def __init__(self, norm: RMSNorm):
        width = len(norm.weight)
        self.weight = norm.weight.detach().numpy() * numpy.float32(width**0.5)
        self.epsilon = numpy.float32(norm.epsilon * width)

    def __call__(self, x: ndarray) -> ndarray:
        return x * self.weight / numpy.sqrt(numpy.add.reduce(x * x, -1, keepdims=True) + self.epsilon)


class NumpyLinear:
    """A linear layer over rows [n, d], with a transposed copy of the weights, which is fastest for a single row."""

    def __init__(self, linear: FusedLinear):
        self.weight, self.bias = linear.weight.detach().t().contiguous(), linear.bias

    def __call__(self, x: ndarray) -> ndarray:
        rows = torch.from_numpy(x)
        return (rows.mm(self.weight) if self.bias is None else torch.addmm(self.bias, rows, self.weight)).numpy()


class NumpyLayer:
    """One decoder layer over hidden states [n, d]."""

    def __init__(self, layer: FusedLayer):
        self.index, self.scaling, self.window = layer.index, layer.scaling, layer.window
        self.head_dim, self.heads, self.kv_heads = layer.head_dim, layer.heads, layer.kv_heads
        self.input_norm, self.mlp_norm = NumpyRMSNorm(layer.input_norm), NumpyRMSNorm(layer.mlp_norm)
        self.qkv, self.out, self.gate_up, self.down = map(NumpyLinear, layer.linears)
        self.head_norms = [NumpyRMSNorm(norm) for norm in layer.head_norms]
        self.mlp_width = layer.down.weight.shape[1]
        self.swapped = numpy.roll(numpy.arange(self.head_dim), self.head_dim // 2)

    def __call__(self, hidden: ndarray, cos: ndarray, sin: ndarray, call: Call) -> ndarray:
        hidden = hidden + self.out(self._attention(self.input_norm(hidden), cos, sin, call))
        gate_up = self.gate_up(self.mlp_norm(hidden))
        gate, up = gate_up[:, :self.mlp_width], gate_up[:, self.mlp_width:]
        return hidden + self.down(gate / (1 + numpy.exp(-gate)) * up)

    def _attention(self, hidden: ndarray, cos: ndarray, sin: ndarray, call: Call) -> ndarray:
        qkv = self.qkv(hidden).reshape(len(hidden), -1, self.head_dim).swapaxes(0, 1)  # [heads + 2 kv_heads, n, d]
        qk, values = qkv[:-self.kv_heads], qkv[-self.kv_heads:]
        if self.head_norms:
            query_norm, key_norm = self.head_norms
            qk = numpy.concatenate([query_norm(qk[:self.heads]), key_norm(qk[self.heads:])])
        rotated = torch.from_numpy(qk * cos + qk.take(self.swapped, -1) * sin)
        new = rotated[:self.heads], rotated[self.heads:], torch.from_numpy(values)
        out = attend_all(self.index, new, call, self.scaling, self.window)
        return out.numpy().swapaxes(0, 1).reshape(len(hidden), -1)


class NumpyLlama:
    """The whole network: token ids or embeddings in, logits out."""

    def __init__(self, network: FusedLlama):
        self.layers = [NumpyLayer(layer) for layer in network.layers]
        self.norm, self.head = NumpyRMSNorm(network.norm), NumpyLinear(network.head)
        self.embeddings = network.embeddings.detach().numpy()
        self.cos, self.sin = network.cos.numpy(), network.sin.numpy()

    def __call__(
        self,
        positions: Tensor,
        wanted: Tensor | int,
        call: Call,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Logits [rows, V] of the wanted rows, as `FusedLlama` returns them."""
        with numpy.errstate(over="ignore"):  # exp(-gate) may overflow for very negative gates, whose output is then 0
            return self._logits(positions, wanted, call, input_ids, inputs_embeds)

    def _logits(
        self,
        positions: Tensor,
        wanted: Tensor | int,
        call: Call,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        hidden = self.embeddings[input_ids[0].numpy()] if inputs_embeds is None else inputs_embeds[0].numpy()
        at = positions[0].numpy()
        cos, sin = self.cos[at], self.sin[at]
        if call.plan.is_plain:
            for layer in self.layers:
                hidden = layer(hidden, cos, sin, call)
        else:
            hidden = self._planned(hidden, cos, sin, call)
        return torch.from_numpy(self.head(self.norm(hidden if isinstance(wanted, int) else hidden[wanted.numpy()])))

    def _planned(self, hidden: ndarray, cos: ndarray, sin: ndarray, call: Call) -> ndarray:
        """Run the layers of the plan, capturing hidden states."""
        for layer in self.layers:
            hidden = _layer_input(call, layer.index, hidden)
            if call.plan.runs(layer.index):
                hidden = layer(hidden, cos, sin, call)
        return _layer_input(call, len(self.layers), hidden)


def _layer_input(call: Call, layer: int, hidden: ndarray) -> ndarray:
    return call.enter(layer, torch.from_numpy(hidden)).numpy()


def build_numpy_llama(network: FusedLlama | None) -> NumpyLlama | None:
    """The numpy forward of a network; None if it is large, has no fused forward, or is not a float32 CPU network."""
    if network is None or network.embeddings.device.type != "cpu" or network.embeddings.dtype != torch.float32:
        return None
    return NumpyLlama(network) if network.weights <= MAX_WEIGHTS else None
