"""Compares a loaded model with the library's own forward, so that no model writes something else than it should.

The library reads two texts without a cache, before any hook is installed, and one of them with its own cache. The model
reads the same tokens in several forwards: a prompt, a single token, a tree with two branches, and after one branch is
committed a continuation, batched with a second cache. State that is lost between forwards, rows that see too much or
too little, and positions that are off all change some row of logits. Each layer may write each row at most once.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from playground.engine.attention.library_cache import positions_given
from playground.engine.attention.library_masks import window_sizes
from playground.engine.cache.kv_buffer import KVBuffer
from playground.engine.cache.kv_cache import KVCache
from playground.engine.forward_input import ForwardInput

PROMPT, LONGEST_PROMPT = 5, 64  # tokens; windows that fit into the longest prompt are gone past for real
BRANCH, REST = 2, 2
Forward = Callable[[list[ForwardInput]], tuple[list[Tensor], dict[int, Tensor]]]


@dataclass(frozen=True)
class Reference:
    """Two texts with a common beginning, and the library's logits [n, V] after each of their tokens."""

    prompt: int  # tokens of the first forward
    committed: list[int]
    rejected: list[int]
    committed_logits: Tensor
    rejected_logits: Tensor

    @classmethod
    def of(cls, network: PreTrainedModel) -> Reference:
        """Raises Refusal if the library's own forward fails."""
        prompt = prompt_length(network.config)
        ids = ordinary_tokens(network.config, prompt + 1 + 2 * BRANCH + REST)
        start, first, second = ids[:prompt + 1], ids[prompt + 1:prompt + 3], ids[prompt + 3:]
        texts = start + second, start + first
        return cls(prompt, *texts, *(_library_logits(network, text) for text in texts))

    @property
    def is_finite(self) -> bool:
        """Whether no logit is NaN, and no row has an infinite one above all others. Logits of tokens that a network
        rules out may be minus infinity.
        """
        return all(bool(logits.amax(-1).isfinite().all()) for logits in (self.committed_logits, self.rejected_logits))

    def library_error(self, network: PreTrainedModel) -> float:
        """How far the library's logits with its own cache, token by token after the prompt as in `generate`, are from
        those without a cache; 0 for networks that have none.
        """
        cache, parts, at = None, [], 0
        for end in range(self.prompt, self.prompt + 3):
            inputs = _inputs(network, self.committed[at:end], at)
            out = network(**inputs, past_key_values=cache, use_cache=True)
            if (cache := getattr(out, "past_key_values", None)) is None:
                return 0.0
            parts.append(out.logits[0])
            at = end
        return self.error(torch.cat(parts), self.committed_logits[:at])

    def error(self, rows: Tensor, expected: Tensor) -> float:
        """Largest difference of logits [n, V] relative to the largest logit; in half precision, where the routing of
        single rows may differ, the median of the rows.
        """
        errors = (rows.float() - expected.float()).abs().amax(-1) / self.committed_logits.abs().max().clamp(min=1.0)
        exact = self.committed_logits.dtype in (torch.float32, torch.float64)
        return float(errors.max() if exact else errors.median())


class CountedBuffer(KVBuffer):
    """Counts the rows written."""

    written = 0

    def write_suffix(self, at: int, rows: Tensor) -> Tensor:
        self.written += rows.shape[1]
        return super().write_suffix(at, rows)


def largest_error(forward: Forward, new_store: Callable[[], KVCache], reference: Reference) -> float:
    """Largest error of any forward, as `Reference.error` has it; infinite if a layer wrote its cache twice."""
    store, errors, fed = new_store(), [], 0
    store.keys = [CountedBuffer(buffer.capacity) for buffer in store.keys]
    for rows, expected in _forwards(forward, store, new_store, reference):
        fed += len(rows)
        errors.append(reference.error(rows, expected))
        if any(buffer.written > fed for buffer in store.keys):
            return float("inf")
    return max(errors) if all(error == error for error in errors) else float("inf")


def prompt_length(config: PreTrainedConfig) -> int:
    """Tokens of the first forward: beyond every window and chunk that is not too long."""
    return PROMPT + max((size for size in window_sizes(config) if size <= LONGEST_PROMPT - PROMPT), default=0)


def ordinary_tokens(config: PreTrainedConfig, count: int) -> list[int]:
    """Ascending token ids without special ones of the config, such as padding or images."""
    text = config.get_text_config(decoder=True)
    fields = {**config.to_dict(), **text.to_dict()}
    special = {value for name, value in fields.items() if name.endswith(("_id", "_index")) and isinstance(value, int)}
    ids = [id for id in range(1, min(text.vocab_size, count + 1 + len(special))) if id not in special] or [0]
    return [ids[index % len(ids)] for index in range(count)]


def _library_logits(network: PreTrainedModel, text: list[int]) -> Tensor:
    return network(**_inputs(network, text, 0), use_cache=False).logits[0]


def _inputs(network: PreTrainedModel, tokens: list[int], start: int) -> dict[str, Tensor]:
    """What `generate` passes for tokens from position `start` on."""
    ids = torch.tensor([tokens], device=network.get_input_embeddings().weight.device)
    return {"input_ids": ids, **positions_given(network, start, len(tokens))}


def _forwards(
    forward: Forward, store: KVCache, new_store: Callable[[], KVCache], reference: Reference
) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits of each forward, and the library's for the same rows."""
    start, text, other = reference.prompt, reference.committed, reference.rejected
    whole, side = reference.committed_logits, reference.rejected_logits
    yield _chain(forward, store, text[:start]), whole[:start]
    store.commit(start - 1)
    yield _chain(forward, store, text[start:start + 1]), whole[start:start + 1]
    store.commit(0)
    at = start + 1
    tree = [other[at], text[at], other[at + 1], text[at + 1]]
    (rows,), _ = forward([ForwardInput(store, tree, [-1, -1, 0, 1])])
    yield rows, torch.stack([side[at], whole[at], side[at + 1], whole[at + 1]])
    store.commit(3)
    at += BRANCH
    works = [ForwardInput(store, text[at:], list(range(-1, REST - 1))),
             ForwardInput(new_store(), other, list(range(-1, len(other) - 1)), last_only=True)]
    rows, _ = forward(works)
    yield torch.cat(rows), torch.cat([whole[at:at + REST], side[-1:]])


def _chain(forward: Forward, store: KVCache, tokens: list[int]) -> Tensor:
    (rows,), _ = forward([ForwardInput(store, tokens, list(range(-1, len(tokens) - 1)))])
    return rows
