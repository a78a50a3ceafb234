"""Sampling primitives: pure functions on scores [n, V]. A removed token has score -inf; every row keeps at least one.

Definitions and edge cases (the token that crosses p, ties with the last of the k) are those of the logits processors of
transformers 5.23, so both give the same scores. `top_p` differs where equal scores meet the border: the library keeps
whichever its unstable sort puts last, this module the lowest ids, so that p = 0 is greedy.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.special import entr

REMOVED = float("-inf")
MIN_TEMPERATURE = 1e-6  # below, scores / t overflows


def temperature(scores: Tensor, t: float) -> Tensor:
    """scores / t. At t = 0 only the largest score of a row is kept, the first of equal ones."""
    return scores / t if t > MIN_TEMPERATURE else greedy(scores)


def greedy(scores: Tensor) -> Tensor:
    """Keep only the largest score of each row, the first of equal ones."""
    best = scores.argmax(-1, keepdim=True)
    return torch.full_like(scores, REMOVED).scatter(-1, best, scores.gather(-1, best))


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k largest scores and those that tie with the last of them; k = 0 keeps all."""
    if not 0 < k < scores.shape[-1]:
        return scores
    return scores.masked_fill(scores < scores.topk(k).values[..., -1:], REMOVED)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the most probable tokens up to and including the one that makes their sum reach p, lower ids first on ties.
    """
    if p >= 1:
        return scores
    # flipped, so that of equal scores the lowest id is removed last
    ordered, order = (x.flip(-1) for x in scores.sort(descending=True, stable=True))
    out = ordered.softmax(-1).cumsum(-1) <= 1 - p
    out[..., -1] = False
    return scores.masked_fill(out.scatter(-1, order, out), REMOVED)


def min_p(scores: Tensor, m: float) -> Tensor:
    """Keep tokens at least m times as probable as the most probable one."""
    if m <= 0:
        return scores
    probabilities = scores.softmax(-1)
    out = probabilities < m * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(out.scatter(-1, scores.argmax(-1, keepdim=True), False), REMOVED)


def floor(scores: Tensor, least: Tensor) -> Tensor:
    """Keep tokens with a probability of at least `least` [n, 1], and the most probable ones of each row."""
    return scores.masked_fill((scores.softmax(-1) < least) & (scores < scores.amax(-1, keepdim=True)), REMOVED)


def repetition_penalty(scores: Tensor, history: list[int], penalty: float) -> Tensor:
    """Divide positive scores of the tokens in `history` by the penalty and multiply negative ones; one row [V]."""
    seen = torch.tensor(sorted(set(history)), dtype=torch.long, device=scores.device)
    seen = seen[seen < scores.shape[-1]]
    old = scores[seen]
    return scores.index_copy(0, seen, torch.where(old < 0, old * penalty, old / penalty))


def entropy(scores: Tensor) -> Tensor:
    """Entropy in nats of each row's softmax, [n]."""
    return entr(scores.softmax(-1)).sum(-1)


def one_hot(token: int, like: Tensor) -> Tensor:
    """Probability 1 on one token, [V]."""
    probabilities = torch.zeros_like(like)
    probabilities[token] = 1
    return probabilities


def residual_distribution(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) renormalised, [V]; p itself if the residual is zero up to rounding."""
    residual = (p - q).clamp(min=0)
    total = residual.sum()
    return residual / total if total > 0 else p


def contrast(with_context: Tensor, without: Tensor, alpha: float | Tensor) -> Tensor:
    """(1 + alpha) * with_context - alpha * without, which amplifies the effect of the context; alpha may be [n, 1]."""
    return (1 + alpha) * with_context - alpha * without


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats of the softmax of two rows, [n].

    0 for equal distributions, ln 2 for disjoint ones.
    """
    p, q = first.softmax(-1), second.softmax(-1)
    return (entr((p + q) / 2).sum(-1) - (entr(p).sum(-1) + entr(q).sum(-1)) / 2).clamp(min=0)
