"""One forward of the engine after a prefilled KV cache: its time for a block of tree nodes, and the cache's memory."""
from __future__ import annotations

import torch

from playground.bench.speed.bandwidth_limit import cache_bytes_a_token
from playground.bench.speed.baselines import Baseline
from playground.bench.speed.speed_defaults import ALLOCATED, DEVICE, FORMULA, HELD, block
from playground.bench.speed.speed_prompts import Task
from playground.engine.cache.kv_buffer import Capacity
from playground.engine.cache.kv_cache import KVCache
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model

FORWARDS = 10  # timed together, since one is short
CHUNK = 512  # prompt tokens per forward


def binary_tree(nodes: int) -> list[int]:
    """Parents of a draft tree with two children per node; -1 is the end of the text."""
    return [node // 2 - 1 for node in range(nodes)]


def prefilled_cache(model: Model, ids: list[int]) -> KVCache:
    """A KV cache after the prefill of a prompt, allocated as for a lane whose text ends there."""
    store = model.new_store(Capacity(len(ids), len(ids)))
    for start in range(0, len(ids), CHUNK):
        piece = ids[start:start + CHUNK]
        model.forward([ForwardInput(store, piece, list(range(-1, len(piece) - 1)), last_only=True)])
        store.commit(len(piece) - 1)
    return store


def blocks(model: Model, store: KVCache, sizes: tuple[int, ...]) -> list[Baseline]:
    """Trees of these sizes, each fed FORWARDS times after the same cache, which is left unchanged."""
    def baseline(nodes: int) -> Baseline:
        parents = binary_tree(nodes)

        def write(tokens: list[int]) -> None:
            for _ in range(FORWARDS):
                model.forward([ForwardInput(store, tokens, parents)])
                store.crop_scratch()

        return Baseline(block(nodes), lambda task: _tokens(task, nodes), write, lambda output: [], model.device)

    return [baseline(nodes) for nodes in sizes]


def _tokens(task: Task, nodes: int) -> list[int]:
    return [task.ids[node % len(task.ids)] for node in range(nodes)]


def cache_memory(model: Model, ids: list[int]) -> dict[str, float]:
    """Bytes of a KV cache after a prefill: by the formula, live slots, allocated tensors, and growth of device memory.

    The last is measured on a GPU only.
    """
    before = _device_bytes(model)
    store = prefilled_cache(model, ids)
    grown = {DEVICE: _device_bytes(model) - before} if model.device.type == "cuda" else {}
    allocated = sum(pool.rows.untyped_storage().nbytes() for pool in [*store.keys, *store.values])
    return {FORMULA: len(ids) * cache_bytes_a_token(model.network), HELD: store.bytes(), ALLOCATED: allocated, **grown}


def _device_bytes(model: Model) -> int:
    return torch.cuda.memory_allocated(model.device) if model.device.type == "cuda" else 0
