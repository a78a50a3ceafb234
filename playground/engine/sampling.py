"""Sampling primitives: pure functions on rows of scores [n, V]. A removed token has score -inf; every row keeps at
least one.

Definitions and their edge cases (ties, the token that crosses p) follow the processors of transformers 5.23, so both
give equal rows.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.special import entr

REMOVED = float("-inf")
COLDEST = 1e-6  # below this the quotients leave the range of numbers


def temperature(scores: Tensor, t: float) -> Tensor:
    """scores / t. At t = 0 only the largest score of a row is left, the first where several are equal."""
    return scores / t if t > COLDEST else greedy(scores)


def greedy(scores: Tensor) -> Tensor:
    """Only the largest score of a row is left."""
    best = scores.argmax(-1, keepdim=True)
    return torch.full_like(scores, REMOVED).scatter(-1, best, scores.gather(-1, best))


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k largest, and what ties with the last of them; k = 0 keeps all."""
    if not 0 < k < scores.shape[-1]:
        return scores
    return scores.masked_fill(scores < scores.topk(k).values[..., -1:], REMOVED)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the most probable tokens up to and with the one that makes their sum reach p."""
    if p >= 1:
        return scores
    # of equals the lowest id stays longest
    ordered, order = (x.flip(-1) for x in scores.sort(descending=True, stable=True))
    out = ordered.softmax(-1).cumsum(-1) <= 1 - p
    out[..., -1] = False
    return scores.masked_fill(out.scatter(-1, order, out), REMOVED)


def min_p(scores: Tensor, m: float) -> Tensor:
    """Keep tokens at least m times as probable as the best."""
    if m <= 0:
        return scores
    probabilities = scores.softmax(-1)
    out = probabilities < m * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(out.scatter(-1, scores.argmax(-1, keepdim=True), False), REMOVED)


def floor(scores: Tensor, least: Tensor) -> Tensor:
    """Keep tokens with a probability of at least `least` [n, 1], and the best of each row."""
    return scores.masked_fill((scores.softmax(-1) < least) & (scores < scores.amax(-1, keepdim=True)), REMOVED)


def repetition_penalty(scores: Tensor, history: list[int], penalty: float) -> Tensor:
    """One row [V]: every distinct token of the history once, positive scores divided, negative ones multiplied."""
    seen = torch.tensor(sorted(set(history)), dtype=torch.long, device=scores.device)
    seen = seen[seen < scores.shape[-1]]
    held = scores[seen]
    return scores.index_copy(0, seen, torch.where(held < 0, held * penalty, held / penalty))


def entropy(scores: Tensor) -> Tensor:
    """Entropy in nats of each row's softmax, [n]."""
    return entr(scores.softmax(-1)).sum(-1)


def certain(token: int, like: Tensor) -> Tensor:
    """All chance on one token, [V]."""
    chances = torch.zeros_like(like)
    chances[token] = 1
    return chances


def leftover(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) renormalised, [V]; p itself where nothing is left over but rounding."""
    rest = (p - q).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else p


def contrast(with_context: Tensor, without: Tensor, alpha: float | Tensor) -> Tensor:
    """(1 + alpha) * with_context - alpha * without: scores that carry further what the context changes; alpha may
    differ by row, [n, 1].
    """
    return (1 + alpha) * with_context - alpha * without


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats of the softmax of two rows, [n]: 0 where they are equal, ln 2 where they share
    no token.
    """
    p, q = first.softmax(-1), second.softmax(-1)
    return (entr((p + q) / 2).sum(-1) - (entr(p).sum(-1) + entr(q).sum(-1)) / 2).clamp(min=0)
