"""The first step of a head's training, on two short texts with random states, and its targets written again."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from playground.algorithms.draft_heads.head_training import BETAS, HeadBatch
from playground.contract import find
from playground.events import Figure
from support.draft_heads import DEPTH, WIDTH, random_weights

VOCABULARY, LENGTH = 24, 9
STARTS, ENDS = (2, 4), (9, 7)  # of what the target wrote in each text; padding follows
NEAR = 1e-4  # relative, in float32


class Lessons:
    """What a training reads. It starts from the random weights of a head."""

    width, depth, seed, epochs, last_layer = WIDTH, DEPTH, 0, 1, {}

    def __init__(self, name: str):
        self.name, chance = name, torch.Generator().manual_seed(7)
        self.embeddings, self.lm_head = torch.randn(2, VOCABULARY, WIDTH, generator=chance)
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=chance)
        places = torch.arange(LENGTH)
        written = torch.stack([(places >= start) & (places < end) for start, end in zip(STARTS, ENDS)])
        states = {layer: torch.randn(2, LENGTH, WIDTH, generator=chance) for layer in range(DEPTH + 1)}
        self.batch = HeadBatch(ids, written, states)

    @property
    def states(self) -> Tensor:
        """Inputs of the lm_head [texts, tokens, width], in float64."""
        return self.batch.states[DEPTH].double()

    def batches(self, epoch: int) -> Iterator[HeadBatch]:
        yield self.batch

    held_out = batches

    def fitted(self, name: str) -> None:
        """No other head."""

    def resumed(self) -> dict:
        weights = {name: part.float() if part.is_floating_point() else part
                   for name, part in random_weights(self.name).items()}
        network = find(self.name).build(weights)
        head = {name: part for name, part in network.state_dict().items() if name != "accuracy"}
        return {"epoch": 0, "head": head, "optimizer": torch.optim.AdamW(network.parameters(), 1.0, BETAS).state_dict()}

    def save(self, state: dict) -> None:
        """Nothing is kept."""

    def progress(self, share: float, text: str) -> None:
        """Nothing is shown."""


def first_losses(lessons: Lessons) -> list[float]:
    """The losses by depth before the weights change."""
    events = (event for event in find(lessons.name).train(lessons) if isinstance(event, Figure))
    return list(next(events).data["series"].values())


def targets(count: int) -> list[tuple[int, int]]:
    """Texts and positions whose `count`-th next token the target wrote."""
    return [
        (text, place) for text in range(2) for place in range(LENGTH) if STARTS[text] <= place + count < ENDS[text]
    ]


def mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean())


def cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Of a distribution [V] for logits [V]."""
    return -(teacher * (logits - logits.logsumexp(-1))).sum()


def smooth_l1(found: Tensor, true: Tensor) -> Tensor:
    """Quadratic where the difference is below 1, linear beyond; the mean over all numbers."""
    off = (found - true).abs()
    return torch.where(off < 1, 0.5 * off**2, off - 0.5).mean()


def differ(found: list[float], expected: list[float]) -> bool:
    """Whether losses differ by more than rounding."""
    assert len(found) == len(expected) and all(value != 0 for value in expected)
    return any(abs(a - b) > NEAR * abs(b) for a, b in zip(found, expected))
