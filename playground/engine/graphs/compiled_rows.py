"""Forwards of few rows on a CPU, by the layers that numba compiles (`row_kernels.py`), where numba is installed.

For small networks of the Llama family that run in float32 and whose weights are numbers of bfloat16, such as the
bundled ones: rows of any number of lanes, without anything that reads on the way. All other forwards run as in
`fused_llama.py`. The logits are equal up to rounding, and are checked like those.
"""
from __future__ import annotations

import logging
from importlib.util import find_spec
from operator import is_
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor
from torch.nn.functional import embedding

from playground.engine.hooks import Call

if TYPE_CHECKING:
    from playground.engine.attention.segment_attention import Segment
    from playground.engine.cache.kv_buffer import KVBuffer
    from playground.engine.cache.kv_cache import KVCache
    from playground.engine.graphs.fused_llama import FusedLayer, FusedLlama

    Angles = tuple[numpy.ndarray, numpy.ndarray]  # cosines and sines of the positions, [rows, head_dim]

log = logging.getLogger(__name__)
MOST_ROWS = 16  # with more, oneDNN's products are faster
MOST_WEIGHTS = 2 ** 26  # of a network: those of larger ones are not copied
FAINT = 2.0 ** -30  # of a matrix's largest weight: smaller ones are below the rounding of any sum with it


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
        from playground.engine.graphs import row_kernels
        self._kernels, self._network, first = row_kernels, network, network.layers[0]
        self._layers = [LayerWeights.of(layer) for layer in network.layers]
        self._norm, self._head = _array(network.norm.weight), halves(network.head.weight)
        self._scaling, self._turned = first.scaling, first.heads + first.kv_heads  # heads that have a position
        self._window = min((layer.window for layer in network.layers if layer.window), default=None)
        self._memories: WeakKeyDictionary[KVBuffer, CacheMemory] = WeakKeyDictionary()  # by the first buffer of a cache

    def fits(self, call: Call) -> bool:
        """Whether these are few rows of caches that hold their states in memory as they were written, with room."""
        return (
            call.plan.is_plain
            and sum(segment.rows for segment in call.segments) <= MOST_ROWS
            and all(segment.is_plain(self._window) and self._has_room(segment) for segment in call.segments)
        )

    def _has_room(self, segment: Segment) -> bool:
        """Whether every layer has memory of its own for the rows' slots, after those that are another cache's."""
        return segment.starts[0] + segment.rows - segment.store.common <= self._memory_of(segment.store).slots

    def _memory_of(self, store: KVCache) -> CacheMemory:
        """Where a cache holds its states; the layers are asked again only if one of them has moved to other memory."""
        held, known = _held_by(store), self._memories.get(store.keys[0])
        if known is None or not all(map(is_, held, known.held)):
            known = self._memories[store.keys[0]] = CacheMemory.of(store, held)
        return known

    def __call__(self, ids: Tensor, positions: Tensor, wanted: Tensor | int, segments: list[Segment]) -> Tensor:
        """Logits [n, V] of the wanted rows, an index or 0 for all, of token ids [rows] at positions [rows].

        Writes the rows' keys and values.
        """
        network, parts = self._network, self._parts(segments)
        hidden = embedding(ids, network.embeddings).numpy()
        angles = network.cos[positions].numpy(), network.sin[positions].numpy()
        for index in range(len(self._layers)):
            self._run_layer(index, hidden, angles, parts)
        hidden = hidden if isinstance(wanted, int) else hidden[wanted.numpy()]
        logits = torch.empty(len(hidden), len(self._head))
        self._kernels.read_logits(hidden, self._norm, network.norm.epsilon, self._head, logits.numpy())
        return logits

    def _parts(self, segments: list[Segment]) -> list[OwnRows]:
        parts, start = [], 0
        for segment in segments:
            store, shared = segment.store, segment.store.common
            rows, trunk = slice(start, start + segment.rows), segment.starts[0] - segment.first - shared
            parts.append(OwnRows(self._memory_of(store).layers, rows, shared, trunk, segment.ancestors()))
            start += segment.rows
        return parts

    def _run_layer(self, index: int, hidden: numpy.ndarray, angles: Angles, parts: list[OwnRows]) -> None:
        """One layer over hidden states [rows, d], in place."""
        layer, kernels = self._layers[index], self._kernels
        states = numpy.empty((len(hidden), len(layer.qkv)), numpy.float32)
        mixed = numpy.empty((len(hidden), layer.out.shape[1]), numpy.float32)
        kernels.run_before_attention(hidden, layer.input_norm, layer.epsilon, layer.qkv, *angles, self._turned, states)
        for own in parts:
            kernels.attend(states[own.rows], *own.states(index), self._scaling, mixed[own.rows])
        ffn = layer.mlp_norm, layer.epsilon, layer.gate_up, layer.down
        kernels.run_after_attention(hidden, mixed, layer.out, *ffn)


LayerMemory = tuple[numpy.ndarray, ...]
"""Keys and values of a layer, [kv_heads, allocated slots, head_dim]: of the cache with its prefix, and its own."""


class CacheMemory(NamedTuple):
    """Where the layers of a cache hold their states, as long as their buffers keep this memory."""

    held: list[Tensor | None]
    slots: int  # that each layer has room for; 0 if one does not hold them as they were written
    layers: list[LayerMemory]

    @classmethod
    def of(cls, store: KVCache, held: list[Tensor | None]) -> CacheMemory:
        owner, own = store.prefix_owner or store, [*store.keys, *store.values]
        begins = owner is store or all(map(_begins, [*owner.keys, *owner.values], own))
        if not (begins and all(map(_is_plain_memory, own))):
            return cls(held, 0, [])
        each = zip(owner.keys, owner.values, store.keys, store.values)
        layers = [tuple(buffer.rows.numpy() for buffer in buffers) for buffers in each]
        return cls(held, min(buffer.rows.shape[1] for buffer in own), layers)


class OwnRows(NamedTuple):
    """The rows of one cache."""

    layers: list[LayerMemory]
    rows: slice  # of all that the forward has
    shared: int  # slots of another cache before its own
    trunk: int  # of its own slots that each row sees
    seen: numpy.ndarray  # which of the slots after these each row sees, [rows, slots] of 0 and 1

    def states(self, layer: int) -> tuple:
        """What `row_kernels.attend` gets of a layer: key and value states before, how many, and its own."""
        old_keys, old_values, keys, values = self.layers[layer]
        return old_keys, old_values, self.shared, keys, values, self.trunk, self.seen


def _held_by(store: KVCache) -> list[Tensor | None]:
    """The memory of a cache, and of the one that its prefix belongs to: of each buffer its rows and what it shares."""
    caches = [store, store.prefix_owner] if store.prefix_owner else [store]
    buffers = [buffer for cache in caches for buffer in (*cache.keys, *cache.values)]
    return [memory for buffer in buffers for memory in (buffer.rows, buffer.prefix)]


def _is_plain_memory(buffer: KVBuffer) -> bool:
    rows = buffer.rows
    return rows is not None and buffer.ragged is None and rows.is_contiguous() and rows.dtype == torch.float32


def _begins(owner: KVBuffer, buffer: KVBuffer) -> bool:
    """Whether the memory of `owner` begins with the prefix of `buffer`."""
    return _is_plain_memory(owner) and buffer.prefix is not None and buffer.prefix.data_ptr() == owner.rows.data_ptr()


def _array(weights: Tensor) -> numpy.ndarray:
    return weights.detach().contiguous().numpy()


def halves(weights: Tensor) -> numpy.ndarray:
    """The bits of float32 weights as bfloat16, uint16. Raises ValueError if some are no numbers of bfloat16.

    Faint weights become zero. Weight decay leaves channels of 1e-20 behind that do nothing, and their products are
    subnormal numbers, with which a processor computes many times slower.
    """
    half = weights.detach().bfloat16()
    if not torch.equal(half.float(), weights):
        raise ValueError("some weights are no numbers of bfloat16")
    half = half.masked_fill(half.abs() < FAINT * half.abs().max(), 0.0)
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
