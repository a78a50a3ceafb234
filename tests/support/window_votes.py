"""Votes of a window on the prompt, and what stays of it."""
from __future__ import annotations

import torch
from registry import Collapse
from torch import Tensor

from playground.contract import Held
from playground.contract.lane_config import LaneConfig
from support.budget_policies import TREE, best, with_policy

CUT = {"window": 3, "capacity": 11}


def equals(name: str, knobs: dict, other: str, shared: dict) -> list[Collapse]:
    return [Collapse(with_policy(plain, name, **knobs, **shared), with_policy(plain, other, **shared))
            for plain in (LaneConfig("greedy"), TREE)]


HEADS, SLOTS, WINDOW = 3, 20, 3
EARLY = range(SLOTS - WINDOW)


def received(seed: int) -> Tensor:
    """Attention of the window, [heads, rows, slots]; the heads differ in how scattered it is."""
    logits = torch.randn(HEADS, WINDOW, SLOTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (logits * torch.tensor([0.2, 2.0, 5.0])[:, None, None]).softmax(-1)


def after_the_prompt(layer: int = 0) -> Held:
    return Held(layer, 2, "prefill", SLOTS, SLOTS, torch.arange(SLOTS)[None], read=None)


def stays(policy, seed: int) -> list[set[int]]:
    what = after_the_prompt()
    policy.observe_attention(0, received(seed), torch.arange(SLOTS - WINDOW, SLOTS), what.positions)
    kept = (policy.retain(what) & what.live).expand(HEADS, -1)
    return [{p for p in range(SLOTS) if row[p]} for row in kept.tolist()]


def votes(seed: int) -> list[dict[int, float]]:
    return [{p: sum(row[p] for row in head) for p in EARLY} for head in received(seed).tolist()]


LATE = set(range(SLOTS - WINDOW, SLOTS))


# --- shared budgets ---

def competing(heads: list[dict[int, float]], even: int, alpha: float) -> list[set[int]]:
    own = [best(head, int(alpha * even)) for head in heads]
    rest = {(n, p): score for n, head in enumerate(heads) for p, score in head.items() if p not in own[n]}
    more = sorted(rest, key=rest.get, reverse=True)[:even * len(heads) - sum(map(len, own))]
    return [own[n] | {p for m, p in more if m == n} for n in range(len(heads))]


# --- a score, chunks and shared budgets together ---

KEYS = torch.randn(HEADS, SLOTS, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
