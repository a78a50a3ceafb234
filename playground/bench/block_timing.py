"""One forward of the engine behind a filled cache: how long a block of tree nodes takes, and how much memory the cache
does.
"""
from __future__ import annotations

import torch

from playground.bench.bandwidth_limit import cache_bytes_a_token
from playground.bench.baselines import Baseline
from playground.bench.speed_defaults import ALLOCATED, DEVICE, FORMULA, HELD, block
from playground.bench.speed_prompts import Task
from playground.engine.forward_input import ForwardInput
from playground.engine.kv_buffer import Capacity
from playground.engine.kv_cache import KVCache
from playground.engine.model import Model

FORWARDS = 10  # timed together, for one is over soon
CHUNK = 512  # tokens of a prompt in one forward


def binary_tree(nodes: int) -> list[int]:
    """Parents of a tree that guesses two tokens after every one; -1 is the end of the text."""
    return [node // 2 - 1 for node in range(nodes)]


def filled(model: Model, ids: list[int]) -> KVCache:
    """A store that has read a prompt, as a lane reads it whose text ends there."""
    store = model.new_store(Capacity(len(ids), len(ids)))
    for start in range(0, len(ids), CHUNK):
        piece = ids[start:start + CHUNK]
        model.forward([ForwardInput(store, piece, list(range(-1, len(piece) - 1)), last_only=True)])
        store.keep(len(piece) - 1)
    return store


def blocks(model: Model, store: KVCache, sizes: tuple[int, ...]) -> list[Baseline]:
    """Trees of these numbers of nodes, each fed FORWARDS times to the same store, which is left as it was."""
    def fed(nodes: int) -> Baseline:
        parents = binary_tree(nodes)

        def write(tokens: list[int]) -> None:
            for _ in range(FORWARDS):
                model.forward([ForwardInput(store, tokens, parents)])
                store.forget()

        return Baseline(block(nodes), lambda task: _tokens(task, nodes), write, lambda left: [], model.device)

    return [fed(nodes) for nodes in sizes]


def _tokens(task: Task, nodes: int) -> list[int]:
    return [task.ids[node % len(task.ids)] for node in range(nodes)]


def cache_memory(model: Model, ids: list[int]) -> dict[str, float]:
    """Bytes of a filled cache: by the formula, as the store counts what it holds, as its tensors are allocated, and as
    the device's memory grew.

    The last only on a GPU, where it is counted.
    """
    before = _device_bytes(model)
    store = filled(model, ids)
    grown = {DEVICE: _device_bytes(model) - before} if model.device.type == "cuda" else {}
    allocated = sum(pool.rows.untyped_storage().nbytes() for pool in [*store.keys, *store.values])
    return {FORMULA: len(ids) * cache_bytes_a_token(model.network), HELD: store.bytes(), ALLOCATED: allocated, **grown}


def _device_bytes(model: Model) -> int:
    return torch.cuda.memory_allocated(model.device) if model.device.type == "cuda" else 0
