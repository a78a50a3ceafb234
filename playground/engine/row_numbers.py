"""What the host reads of rows of logits, in one tensor."""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from playground.engine.sampling import REMOVED, entropy_of, largest

CANDIDATES = 10  # most probable tokens that are recorded of a row
FAVOURITES = 5  # masked tokens that are listed


def row_numbers(raw: Tensor, count: int) -> Tensor:
    """Of each row of logits [n, V]: entropy in nats, most probable token, then tokens, probabilities and
    log-probabilities of the `count` most probable, [n, 2 + 3 * count], in the type of the logits.

    Tokens must be below 2^24.
    """
    logp = raw.log_softmax(-1)
    p = logp.exp()
    values, ids = largest(p, count)
    parts = entropy_of(p, raw)[:, None], raw.argmax(-1, keepdim=True), ids, values, logp.gather(-1, ids)
    return torch.cat([part.to(raw.dtype) for part in parts], 1)


def processed_numbers(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of the distribution of scores [n, V] after masks and samplers: its entropy in nats, [n, 1], and the
    probabilities of tokens [n, k].

    Without a sampler that draws, the most probable token of this distribution is taken.
    """
    p = scores.softmax(-1).nan_to_num()
    return entropy_of(p, scores).nan_to_num()[:, None], p.gather(-1, tokens)


def removing_stages(stages: list[Tensor], tokens: Tensor) -> Tensor:
    """For tokens [n, k] of rows, and scores [n, V] after each stage, the raw ones first: the number of the first stage
    that removed each, [n, k]; 0 for none.
    """
    first = torch.zeros_like(tokens)
    for number in range(len(stages) - 1, 0, -1):  # earlier stages overwrite later ones
        first = first.masked_fill(stages[number].gather(-1, tokens) == REMOVED, number)
    return first


def mask_numbers(p: Tensor, allowed: Tensor, ends: Iterable[int]) -> list[Tensor]:
    """Of masks, bool [n, V], over distributions p [n, V]: the probabilities of the most probable masked tokens, these
    tokens, and [n, 3]: the probability that is masked, the number of allowed tokens, and whether one of `ends` is.
    """
    banned = p.masked_fill(allowed, 0.0)
    known = [token for token in ends if token < allowed.shape[1]]
    may_end = torch.stack([allowed[:, token] for token in known]).any(0) if known else allowed.new_zeros(len(p))
    sums = torch.stack([banned.sum(-1), allowed.sum(-1).to(p.dtype), may_end.to(p.dtype)], 1)
    return [*largest(banned, FAVOURITES), sums]
