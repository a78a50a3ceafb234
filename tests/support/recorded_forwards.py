"""Forwards recorded for replay."""
from __future__ import annotations

from collections.abc import Callable

import torch
from architectures import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import byte_tokenizer, network

from playground.engine.graphs.graph_replay import GraphReplay
from playground.engine.model import Model

ENOUGH = 1 << 30  # bytes of unused rooms


class Tape(TorchDispatchMode):
    """The operations of a run, with references to their tensors."""

    def __init__(self, run: Callable[[], None]):
        super().__init__()
        self._operations: list[tuple] = []
        with self:
            run()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self._operations.append((operation, args, kwargs or {}, out))
        return out

    def __call__(self) -> None:
        for operation, args, kwargs, out in self._operations:
            for old, new in zip(tensors(out), tensors(operation(*args, **kwargs))):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(found) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def recorded(kind: str, record=Tape) -> Model:
    model = Model(tiny(kind), byte_tokenizer(), kind)
    model.replay = GraphReplay(model.fused, record, ENOUGH)
    return model


def tiny_writer() -> Model:
    """With the tokenizer's own vocabulary, so that it can write."""
    return Model(network("llama").double(), byte_tokenizer(), "tiny")
