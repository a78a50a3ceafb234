"""Forwards of few rows on a CPU, by the layers that numba compiles (`row_kernels.py`), where numba is installed.

For small networks of the Llama family that run in float32 and whose weights are numbers of bfloat16, such as the
bundled ones: rows of one lane over a cache of its own, without anything that reads on the way. All other forwards run
as in `fused_llama.py`. The logits are equal up to rounding, and are checked like those.
"""
from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.functional import embedding

from playground.engine.hooks import Call

if TYPE_CHECKING:
    from playground.engine.attention.segment_attention import Segment
    from playground.engine.cache.kv_cache import KVCache
    from playground.engine.graphs.fused_llama import FusedLayer, FusedLlama

log = logging.getLogger(__name__)
MOST_ROWS = 2  # with more, oneDNN's products are faster
MOST_WEIGHTS = 2 ** 26  # of a network: those of larger ones are not copied


class LayerWeights(NamedTuple):
    """What a compiled layer reads: norms in float32 and matrices as the bits of bfloat16."""

    input_norm: numpy.ndarray
    mlp_norm: numpy.ndarray
    epsilon: float
    qkv: numpy.ndarray
    out: numpy.ndarray
    gate_up: numpy.ndarray
    down: numpy.ndarray

    @classmethod
    def of(cls, layer: FusedLayer) -> LayerWeights:
        matrices = layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down
        norms = layer.input_norm.weight, layer.mlp_norm.weight
        return cls(*map(_array, norms), layer.input_norm.epsilon, *(halves(linear.weight) for linear in matrices))


class CompiledRows:
    """The network's forward of up to `MOST_ROWS` rows. Raises ImportError if numba cannot compile or cache here."""

    def __init__(self, network: FusedLlama):
        from playground.engine.graphs.row_kernels import read_logits, run_layer
        self._run_layer, self._read_logits, self._network = run_layer, read_logits, network
        self._layers = [LayerWeights.of(layer) for layer in network.layers]
        self._norm, self._head = _array(network.norm.weight), halves(network.head.weight)
        self._scaling = network.layers[0].scaling
        self._window = min((layer.window for layer in network.layers if layer.window), default=None)

    def fits(self, call: Call) -> bool:
        """Whether these are few rows of one cache that hold its states in memory as they were written, with room."""
        segment, *others = call.segments
        return (
            call.plan.is_plain
            and not others
            and segment.rows <= MOST_ROWS
            and segment.is_plain(self._window)
            and _has_room(segment.store, segment.starts[0] + segment.rows)
        )

    def __call__(self, ids: Tensor, positions: Tensor, wanted: Tensor | int, segment: Segment) -> Tensor:
        """Logits [n, V] of the wanted rows, an index or 0 for all, of token ids [rows] at positions [rows].

        Writes the rows' keys and values.
        """
        network, store = self._network, segment.store
        hidden = embedding(ids, network.embeddings).numpy()
        cos, sin = network.cos[positions].numpy(), network.sin[positions].numpy()
        trunk, seen = segment.starts[0] - segment.first, segment.ancestors()
        for layer, keys, values in zip(self._layers, store.keys, store.values):
            norms, epsilon, matrices = layer[:2], layer.epsilon, layer[3:]
            self._run_layer(hidden, *norms, epsilon, *matrices, cos, sin, keys.rows.numpy(), values.rows.numpy(), trunk,
                            seen, self._scaling)
        hidden = hidden if isinstance(wanted, int) else hidden[wanted.numpy()]
        logits = torch.empty(len(hidden), len(self._head))
        self._read_logits(hidden, self._norm, network.norm.epsilon, self._head, logits.numpy())
        return logits


def _has_room(store: KVCache, slots: int) -> bool:
    """Whether every layer has memory of its own for so many slots, of which none are shared."""
    return all(
        buffer.prefix is None and buffer.rows is not None and buffer.rows.shape[1] >= slots
        and buffer.rows.is_contiguous() and buffer.rows.dtype == torch.float32
        for buffer in (*store.keys, *store.values)
    )


def _array(weights: Tensor) -> numpy.ndarray:
    return weights.detach().contiguous().numpy()


def halves(weights: Tensor) -> numpy.ndarray:
    """The bits of float32 weights as bfloat16, uint16. Raises ValueError if some are no numbers of bfloat16."""
    half = weights.detach().bfloat16()
    if not torch.equal(half.float(), weights):
        raise ValueError("some weights are no numbers of bfloat16")
    return half.contiguous().view(torch.uint16).numpy()


def build_compiled_rows(network: FusedLlama | None) -> CompiledRows | None:
    """The compiled forward; None without numba, and for networks that it does not compute or that are large."""
    if network is None:
        return None
    weight = network.embeddings
    small = weight.is_cpu and weight.dtype == torch.float32 and network.weights <= MOST_WEIGHTS and not network.spread
    if not (small and find_spec("numba") and all(map(_is_plain, network.layers))):
        return None
    try:
        return CompiledRows(network)
    except ValueError:  # weights of another precision
        return None
    except Exception as reason:  # a folder that cannot be written, or a numba that does not know this numpy
        log.warning("forwards are not compiled: %s", reason)
        return None


def _is_plain(layer: FusedLayer) -> bool:
    """Whether a layer has neither biases nor norms of its heads, and the norms one epsilon."""
    biases = (part.bias for part in (layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down))
    same = layer.input_norm.epsilon == layer.mlp_norm.epsilon
    return same and not layer.head_norms and all(bias is None for bias in biases)
