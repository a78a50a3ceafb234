"""Diversity functions: how much a next token of a group repeats what earlier groups wrote.

Each gives a penalty [live, V] for the beams of a group, whose generated tokens are `own`, given the texts of the beams
of earlier groups with the token they chose in this step, `earlier`.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import exp

import torch
from torch import Tensor
from torch.nn.functional import normalize

Texts = list[list[int]]
PIECE = 8192  # tokens whose embeddings are compared at once


def hamming(own: Texts, earlier: Texts, like: Tensor) -> Tensor:
    """How many beams of earlier groups chose the token in this step."""
    return _counts(Counter(text[-1] for text in earlier), like)


def cumulative(own: Texts, earlier: Texts, like: Tensor, backoff: float) -> Tensor:
    """For each earlier beam exp(-d / backoff), where d is the number of places at which the two texts differ, the new
    token included. So texts that differ already may use the same words.
    """
    penalty = torch.zeros_like(like)
    for row, text in zip(penalty, own):
        for other in earlier:
            apart = sum(a != b for a, b in zip(text, other))
            row += exp(-(apart + 1) / backoff)
            row[other[-1]] += exp(-apart / backoff) - exp(-(apart + 1) / backoff)
    return penalty


def ngrams(own: Texts, earlier: Texts, like: Tensor, n: int) -> Tensor:
    """How often the n-gram that the token completes occurs in earlier texts, at any place."""
    seen = Counter(tuple(text[end - n:end]) for text in earlier for end in range(n, len(text) + 1))
    penalty = torch.zeros_like(like)
    for row, text in zip(penalty, own):
        before = tuple(text[max(0, len(text) - n + 1):]) if n > 1 else ()
        for gram, count in seen.items():
            if gram[:-1] == before:
                row[gram[-1]] = count
    return penalty


def embedding(own: Texts, earlier: Texts, like: Tensor, embed: Callable[[list[int]], Tensor]) -> Tensor:
    """The cosine similarities of the token's embedding to those that earlier beams chose in this step, summed."""
    if not earlier:
        return torch.zeros_like(like)
    chosen = normalize(embed([text[-1] for text in earlier]).to(like), dim=-1)
    places = range(0, like.shape[-1], PIECE)
    pieces = [embed(list(range(place, min(place + PIECE, like.shape[-1])))) for place in places]
    return torch.cat([(normalize(piece.to(like), dim=-1) @ chosen.T).sum(-1) for piece in pieces]).expand_as(like)


def _counts(counts: Counter, like: Tensor) -> Tensor:
    penalty = torch.zeros_like(like)
    for token, count in counts.items():
        penalty[:, token] = count
    return penalty
