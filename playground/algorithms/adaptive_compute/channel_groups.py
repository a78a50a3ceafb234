"""Divides the channels of a feed-forward network into groups of equal size whose gate weights are similar."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

ROUNDS = 10


def clustered(rows: Tensor, groups: int, chance: torch.Generator) -> list[Tensor]:
    """Divide unit rows [n, d] into `groups` of n // groups around their means; the row numbers of each."""
    centres, size = rows[torch.randperm(len(rows), generator=chance)[:groups]], len(rows) // groups
    for _ in range(ROUNDS):
        members = _assigned(rows @ centres.T, size)
        centres = torch.stack([normalize(rows[chosen].mean(0), dim=0) for chosen in members])
    return members


def _assigned(likeness: Tensor, size: int) -> list[Tensor]:
    """Give each row to the most similar group with room; those with the clearest preference choose first."""
    best = likeness.topk(2, -1).values
    ranked = likeness.argsort(descending=True).tolist()
    members: list[list[int]] = [[] for _ in range(likeness.shape[1])]
    for row in (best[:, 0] - best[:, 1]).argsort(descending=True).tolist():
        group = next((group for group in ranked[row] if len(members[group]) < size), None)
        if group is not None:  # rows beyond a multiple of the groups are in none
            members[group].append(row)
    return [torch.tensor(chosen) for chosen in members]
