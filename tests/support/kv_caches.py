"""KV caches filled by hand, and exact attention over them."""
from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from architectures import tiny
from toys import byte_tokenizer
from transformers import PreTrainedModel

from playground.engine.cache.kv_cache import KVCache
from playground.engine.model import ForwardInput, Model

TOKENS = 96


def twins(architecture: str) -> tuple[Model, PreTrainedModel]:
    return Model(tiny(architecture), byte_tokenizer(), architecture), tiny(architecture)


@torch.inference_mode()
def scratch_row(twin: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """Last row of a forward over the whole text, by the library alone."""
    with exact_softmax() if getattr(twin.config, "attn_logit_softcapping", None) else nullcontext():
        return twin(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


@contextmanager
def exact_softmax():
    """The library's attention for soft-capped scores rounds its softmax to float32; an oracle must not."""
    rounding = torch.nn.functional.softmax
    with patch("torch.nn.functional.softmax", lambda x, dim=-1, dtype=None: rounding(x, dim=dim)):
        yield


def feed(model: Model, store: KVCache, tokens: list[int], parents: list[int]) -> torch.Tensor:
    (rows,), _ = model.forward([ForwardInput(store, tokens, parents)])
    return rows


def chain(count: int, start: int = -1) -> list[int]:
    return list(range(start, start + count))


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(TOKENS), k=count)
