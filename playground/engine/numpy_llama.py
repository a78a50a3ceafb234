"""Few rows of a very small network.

A draft model is mostly asked for one row at a time, and in most of the hundred calls that takes it has less to reckon
than a call of torch takes to begin. numpy's begin sooner, so all but the products and the attention go through it. The
products go through torch's own and not oneDNN's, which alone takes ten microseconds to begin. Weights and cache are
those of the lean way; the rows agree up to rounding.
"""
from __future__ import annotations

import numpy
import torch
from numpy import ndarray
from torch import Tensor

from playground.engine.fused_llama import FastLayer, FusedLlama, Norm, Product
from playground.engine.hooks import Call, attend_all

TINY = 2 ** 21  # weights of a network up to which it pays
FEW = 4  # rows of a forward up to which it pays


class LightNorm:
    """The root mean square norm of rows [..., d]. Squares are summed and not averaged, so the weight bears the
    difference.
    """

    def __init__(self, norm: Norm):
        width = len(norm.weight)
        self.weight, self.least = (
            norm.weight.detach().numpy() * numpy.float32(width**0.5),
            numpy.float32(norm.epsilon * width),
        )

    def __call__(self, x: ndarray) -> ndarray:
        return x * self.weight / numpy.sqrt(numpy.add.reduce(x * x, -1, keepdims=True) + self.least)


class LightProduct:
    """A linear layer over rows [n, d], its weights held a second time, column by column: so a single row is read
    fastest.
    """

    def __init__(self, product: Product):
        self.weight, self.bias = product.weight.detach().t().contiguous(), product.bias

    def __call__(self, x: ndarray) -> ndarray:
        rows = torch.from_numpy(x)
        return (rows.mm(self.weight) if self.bias is None else torch.addmm(self.bias, rows, self.weight)).numpy()


class LightLayer:
    """One decoder layer. Rows are [n, d]."""

    def __init__(self, layer: FastLayer):
        self.index, self.scaling, self.window = layer.index, layer.scaling, layer.window
        self.width, self.heads, self.kv_heads = layer.width, layer.heads, layer.kv_heads
        self.before, self.between = LightNorm(layer.before), LightNorm(layer.between)
        self.qkv, self.out, self.gate_up, self.down = map(LightProduct, layer.products)
        self.head_norms = [LightNorm(norm) for norm in layer.head_norms]
        self.inner, self.swapped = layer.down.weight.shape[1], numpy.roll(numpy.arange(self.width), self.width // 2)

    def __call__(self, hidden: ndarray, cos: ndarray, sin: ndarray, call: Call) -> ndarray:
        hidden = hidden + self.out(self._attention(self.before(hidden), cos, sin, call))
        mixed = self.gate_up(self.between(hidden))
        gate, up = mixed[:, :self.inner], mixed[:, self.inner:]
        return hidden + self.down(gate / (1 + numpy.exp(-gate)) * up)

    def _attention(self, rows: ndarray, cos: ndarray, sin: ndarray, call: Call) -> ndarray:
        mixed = self.qkv(rows).reshape(len(rows), -1, self.width).swapaxes(0, 1)  # [heads + 2 kv_heads, n, d]
        turning, values = mixed[:-self.kv_heads], mixed[-self.kv_heads:]
        if self.head_norms:
            query_norm, key_norm = self.head_norms
            turning = numpy.concatenate([query_norm(turning[:self.heads]), key_norm(turning[self.heads:])])
        turned = torch.from_numpy(turning * cos + turning.take(self.swapped, -1) * sin)
        out = attend_all(
            self.index,
            (turned[: self.heads], turned[self.heads :], torch.from_numpy(values)),
            call,
            self.scaling,
            self.window,
        )
        return out.numpy().swapaxes(0, 1).reshape(len(rows), -1)


class NumpyLlama:
    """The whole network: token ids or embeddings in, rows of logits out."""

    def __init__(self, network: FusedLlama):
        self.layers = [LightLayer(layer) for layer in network.layers]
        self.norm, self.head, self.embeddings = (
            LightNorm(network.norm),
            LightProduct(network.head),
            network.embeddings.detach().numpy(),
        )
        self.cos, self.sin = network.cos.numpy(), network.sin.numpy()

    def __call__(
        self,
        positions: Tensor,
        wanted: Tensor | int,
        call: Call,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Logits [rows, V] of the wanted rows, as `FastLlama` gives them."""
        with numpy.errstate(over="ignore"):  # a gate that is far below zero lets nothing through, and needs no warning
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
        places = positions[0].numpy()
        cos, sin = self.cos[places], self.sin[places]
        if call.plan.is_plain:
            for layer in self.layers:
                hidden = layer(hidden, cos, sin, call)
        else:
            hidden = self._planned(hidden, cos, sin, call)
        return torch.from_numpy(self.head(self.norm(hidden if isinstance(wanted, int) else hidden[wanted.numpy()])))

    def _planned(self, hidden: ndarray, cos: ndarray, sin: ndarray, call: Call) -> ndarray:
        """The layers that the plan runs, capturing hidden states on the way."""
        for layer in self.layers:
            hidden = _entering(call, layer.index, hidden)
            if call.plan.runs(layer.index):
                hidden = layer(hidden, cos, sin, call)
        return _entering(call, len(self.layers), hidden)


def _entering(call: Call, layer: int, hidden: ndarray) -> ndarray:
    return call.enter(layer, torch.from_numpy(hidden)).numpy()


def light_path(network: FusedLlama | None) -> NumpyLlama | None:
    """The light way through a network that has a lean one; None where it is not tiny, or not a processor's."""
    if network is None or network.embeddings.device.type != "cpu" or network.embeddings.dtype != torch.float32:
        return None
    return NumpyLlama(network) if network.weights <= TINY else None
