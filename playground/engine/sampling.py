"""Sampling primitives: pure functions on scores [n, V]. A removed token has score -inf; every row keeps at least one.

Definitions and edge cases (the token that crosses p, ties with the last of the k) are those of the logits processors of
transformers 5.23, so both give the same scores. `top_p` differs where equal scores meet the border: the library keeps
whichever its unstable sort puts last, this module the lowest ids, so that p = 0 is greedy.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from playground.engine.host_copies import read_together

REMOVED = float("-inf")
LOWEST = -1e30  # replaces log 0, so that 0 * log 0 is 0 and not NaN
CHUNK = 512  # tokens; a row's maximum over each chunk says which ones hold its largest values
MIN_TEMPERATURE = 1e-6  # below, scores / t overflows


def temperature(scores: Tensor, t: float) -> Tensor:
    """scores / t; the same tensor at t = 1. At t = 0 only the largest score of a row is kept, the first of equal ones.
    """
    if t == 1:
        return scores
    return scores / t if t > MIN_TEMPERATURE else greedy(scores)


class Largest(NamedTuple):
    """The largest values of each row, the largest first, and their indices, [..., count]."""

    values: Tensor
    indices: Tensor


def largest(values: Tensor, count: int) -> Largest:
    """As `values.topk(count)` over the last dimension; a CPU takes a fifth of the time for a large vocabulary.

    The largest values lie in the chunks with the largest maxima, and maxima are found much faster than an order.
    """
    if not _is_long(values, count):
        return Largest(*values.topk(count, -1))
    places = _places(values, _maxima(values).topk(count, -1).indices)
    found, order = values.gather(-1, places).topk(count, -1)
    return Largest(found, places.gather(-1, order))


def read_largest(values: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The indices and values of the `count` largest of each row [n, V], in descending order, read in one transfer."""
    return [
        [(int(index), value) for value, index in zip(found, indices)]
        for found, indices in read_together(*largest(values, count))
    ]


def first_largest(values: Tensor) -> Tensor:
    """As `values.argmax(-1, keepdim=True)`, the first of equal ones; several times as fast where `largest` is."""
    if not _is_long(values, 1):
        return values.argmax(-1, keepdim=True)
    places = _places(values, _maxima(values).argmax(-1, keepdim=True))
    return places.gather(-1, values.gather(-1, places).argmax(-1, keepdim=True))


def ranked(values: Tensor, count: int) -> Largest:
    """The start of a stable descending sort: the `count` largest of values [V], and of equal ones the first."""
    least = largest(values, min(count, len(values))).values[-1]
    among = (values >= least).nonzero()[:, 0]
    found, order = values[among].sort(descending=True, stable=True)
    return Largest(found[:count], among[order[:count]])


def _is_long(values: Tensor, count: int) -> bool:
    """Whether `count` chunks are a small part of a row."""
    return values.is_cpu and values.shape[-1] >= 4 * CHUNK * count


def _maxima(values: Tensor) -> Tensor:
    """The largest value of every whole chunk, [..., chunks]."""
    size = values.shape[-1]
    return values[..., :size - size % CHUNK].unflatten(-1, (-1, CHUNK)).amax(-1)


def _places(values: Tensor, chunks: Tensor) -> Tensor:
    """Indices of everything in these chunks [..., count] and after the last whole one."""
    size = values.shape[-1]
    rest = torch.arange(size - size % CHUNK, size).expand(*values.shape[:-1], -1)
    return torch.cat([(chunks[..., None] * CHUNK + torch.arange(CHUNK)).flatten(-2), rest], -1)


def greedy(scores: Tensor) -> Tensor:
    """Keep only the largest score of each row, the first of equal ones."""
    best = first_largest(scores)
    return torch.full_like(scores, REMOVED).scatter(-1, best, scores.gather(-1, best))


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k largest scores and those that tie with the last of them; k = 0 keeps all."""
    if not 0 < k < scores.shape[-1]:
        return scores
    return scores.masked_fill(scores < largest(scores, k).values[..., -1:], REMOVED)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the most probable tokens up to and including the one that makes their sum reach p, lower ids first on ties.
    """
    if p >= 1:
        return scores
    if _is_long(scores, 1):
        return torch.stack([_nucleus(row, p) for row in scores])
    # flipped, so that of equal scores the lowest id is removed last
    ordered, order = (x.flip(-1) for x in scores.sort(descending=True, stable=True))
    out = ordered.softmax(-1).cumsum(-1) <= 1 - p
    out[..., -1] = False
    return scores.masked_fill(out.scatter(-1, order, out), REMOVED)


def _nucleus(row: Tensor, p: float) -> Tensor:
    """`top_p` of one row [V], without an order of the tokens that have less than half of what is removed together."""
    chances = row.softmax(-1)
    likely = int((chances >= (1 - p) / (2 * len(row))).sum())  # 0 where a grammar allows no token
    best = ranked(row, max(1, likely)).indices
    from_here = chances[best].flip(0).cumsum(0).flip(0) + (1 - chances[best].sum()).clamp(min=0)
    best = torch.cat([best[:1], best[1:][from_here[1:] > 1 - p]])
    return torch.full_like(row, REMOVED).index_copy(0, best, row[best])


def min_p(scores: Tensor, m: float) -> Tensor:
    """Keep tokens at least m times as probable as the most probable one."""
    if m <= 0:
        return scores
    probabilities = scores.softmax(-1)
    out = probabilities < m * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(out.scatter(-1, first_largest(scores), False), REMOVED)


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
    return entropy_of(scores.softmax(-1), scores)


def entropy_of(p: Tensor, scores: Tensor) -> Tensor:
    """Entropy in nats of p [n, V], the softmax of scores, [n].

    It is the mean of log p, which is linear in the scores: `entr` would take a logarithm for every token.
    """
    below = (scores.amax(-1, keepdim=True) - scores).clamp_(max=-LOWEST)
    return (below.mul_(p).sum(-1) - p.amax(-1).log()).clamp(min=0)


def entropy_sum(p: Tensor) -> Tensor:
    """Entropy in nats of probabilities [n, V], [n]; four times as fast as `entr`."""
    return -p.log().clamp_(min=LOWEST).mul_(p).sum(-1)


def in_float64(x: Tensor) -> Tensor:
    """The same numbers in float64, on the CPU where the device has none: Apple GPUs."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def one_hot(token: int, like: Tensor) -> Tensor:
    """Probability 1 on one token, [V]."""
    probabilities = torch.zeros_like(like)
    probabilities[token] = 1
    return probabilities


def residual_distribution(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0) renormalised, [..., V]; p itself if the residual is zero up to rounding."""
    residual = (p - q).clamp(min=0)
    total = residual.sum(-1, keepdim=True)
    return torch.where(total > 0, residual / total, p)  # on the device: a GPU would run empty while the host reads


def contrast(with_context: Tensor, without: Tensor, alpha: float | Tensor) -> Tensor:
    """(1 + alpha) * with_context - alpha * without, which amplifies the effect of the context; alpha may be [n, 1]."""
    return (1 + alpha) * with_context - alpha * without


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats of the softmax of two rows, [n].

    0 for equal distributions, ln 2 for disjoint ones.
    """
    p, q = first.softmax(-1), second.softmax(-1)
    return (entropy_sum((p + q) / 2) - (entropy_sum(p) + entropy_sum(q)) / 2).clamp(min=0)
