"""Which KV slots merge, by plain loops."""
from __future__ import annotations

import torch
from torch import Tensor

from playground.contract import Merge


def slots(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def by_loop(rows: Tensor, merge: Merge) -> Tensor:
    """Merged rows, one at a time; slots without partners are unchanged."""
    made, (meeting_, added, kept) = rows.clone(), merge
    for number, (head, slot) in enumerate(zip(*(part.tolist() for part in meeting_.targets))):
        come = [
            (float(share), source)
            for share, source, into in zip(added, meeting_.sources[1].tolist(), meeting_.into.tolist())
            if into == number
        ]
        made[head, slot] = kept[number] * rows[head, slot] + sum(share * rows[head, source] for share, source in come)
    return made
