"""Which weights are pruned, by a score: a share of them, or all but N in each group of M inputs."""
from __future__ import annotations

import math

import torch
from torch import Tensor

UNSTRUCTURED = "unstructured"
PATTERNS = (UNSTRUCTURED, "2:4", "4:8", "1:2")
WHOLE = 16.0  # bits of a weight that is kept


def lowest(scores: Tensor, share: float) -> Tensor:
    """Which entries of each row are pruned: a share with the lowest scores, rounded down. Of equal ones the first stay.
    """
    order = scores.flip(-1).argsort(dim=-1, stable=True)[..., :int(share * scores.shape[-1])]
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter(-1, scores.shape[-1] - 1 - order, True)


def outside_pattern(scores: Tensor, pattern: str) -> Tensor:
    """As `lowest`, of scores [rows, in]: in each group of M consecutive inputs all but the N best; inputs left over at
    the end stay.
    """
    keep, of = map(int, pattern.split(":"))
    whole = scores.shape[1] // of * of
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask[:, :whole] = lowest(scores[:, :whole].unflatten(1, (-1, of)), 1 - keep / of).flatten(1)
    return mask


def pruned_bits(zeros: float, pattern: str) -> float:
    """Bits of a weight when those that are kept take 16: with the index of each in its group, or a bit for each weight
    that says whether it is kept, unless storing zeros is cheaper.
    """
    index = 1.0 if pattern == UNSTRUCTURED else (1 - zeros) * math.log2(int(pattern.split(":")[1]))
    return min(WHOLE, WHOLE * (1 - zeros) + index)
