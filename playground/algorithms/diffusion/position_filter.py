"""A small network that predicts from the confidences of a block which proposals are already final, and its training.

Learn2PD: Bao et al. 2025, arXiv 2509.25188.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import binary_cross_entropy_with_logits

from playground.events import Figure, Note

EVERY = 250  # iterations between two measurements
SURE = 0.9  # output at which false positives are reported
HELD_OUT = 5  # one prompt in this many is held out: half of those for validation, half for the report


class Round(NamedTuple):
    """One forward over a block: confidences of all its positions, and which proposals are final."""

    prompt: int
    number: int  # forwards in this block before
    confidence: list[float]
    final: list[bool]


@dataclass(frozen=True)
class FilterTraining:
    """Hyperparameters; the rate is the paper's, which runs up to 40,000 iterations."""

    iterations: int = 3000
    rate: float = 3e-3


class PositionFilter(Module):
    """Two layers with a ReLU, of the width of the block, on confidences [block_length]."""

    def __init__(self, length: int, generator: torch.Generator | None = None):
        super().__init__()
        self.first, self.second = Linear(length, length), Linear(length, length)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight.normal_(std=length ** -0.5, generator=generator)
                layer.bias.zero_()

    @classmethod
    def of(cls, weights: dict[str, Tensor]) -> PositionFilter:
        """The filter with these weights, named as in `state_dict`."""
        filter = cls(len(weights["first.bias"]))
        filter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        return filter.eval()

    def forward(self, confidence: Tensor) -> Tensor:
        """Logits that proposals are final, [n, block_length]."""
        return self.second(self.first(confidence).relu())

    def chances(self, confidence: Sequence[float]) -> list[float]:
        """Probability that each proposal of a block is final."""
        with torch.no_grad():
            return self(torch.tensor([confidence], dtype=torch.float32))[0].sigmoid().tolist()


def oracle_rounds(read: Callable[[dict[int, int]], tuple[list[int], list[float]]], block: range,
                  answer: Sequence[int], prompt: int = 0) -> list[Round]:
    """Fill a block in as few forwards as one who knows its tokens could: every proposal that is right, at once.

    read: proposals and confidences of the block's positions when some of them are filled. answer: the tokens of the
    block. A forward after which nothing would change ends the block.
    """
    filled, rounds, last = {}, [], None
    while len(filled) < len(block):
        proposed, confidence = read(filled)
        final = [token == known for token, known in zip(proposed, answer)]
        rounds.append(Round(prompt, len(rounds), confidence, final))
        filled |= {position: known for position, known, right in zip(block, answer, final) if right}
        if proposed == last:
            break
        last = proposed
    return rounds


def learn_filter(rounds: list[Round], training: FilterTraining, seed: int) -> Iterator[Figure | Note]:
    """Train a filter on rounds of one block length; returns its weights by name. Every round number has equal weight.
    """
    train, validation, test = (_tensors(part) for part in _split(rounds))
    filter = PositionFilter(train.confidence.shape[1], torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(filter.parameters(), lr=training.rate)
    best, kept = float("inf"), filter.state_dict()
    for step in range(training.iterations + 1):
        loss = train.loss(filter)
        if step % EVERY == 0:
            held_out = float(validation.loss(filter).detach())
            yield Figure("scalar", "loss", {"x": step, "axis": "iteration",
                                            "series": {"training": float(loss.detach()), "validation": held_out}})
            if held_out < best:
                best, kept = held_out, {name: tensor.clone() for name, tensor in filter.state_dict().items()}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    filter.load_state_dict(kept)
    yield Note(_report(filter, train, test))
    return kept


@dataclass(frozen=True)
class FilterData:
    """Rounds as tensors: confidence and final [n, block_length], weight [n]."""

    confidence: Tensor
    final: Tensor
    weight: Tensor

    def loss(self, filter: PositionFilter) -> Tensor:
        each = binary_cross_entropy_with_logits(filter(self.confidence), self.final, reduction="none").mean(1)
        return (each * self.weight).sum() / self.weight.sum()

    def accuracy(self, accepted: Tensor) -> float:
        return float((accepted == self.final.bool()).float().mean())


def _split(rounds: list[Round]) -> tuple[list[Round], list[Round], list[Round]]:
    """Training, validation and test rounds, with all rounds of a prompt in one of them."""
    held_out = sorted({one.prompt for one in rounds})[::HELD_OUT]
    validation, test = set(held_out[::2]), set(held_out[1::2])
    return (
        [one for one in rounds if one.prompt not in validation | test],
        [one for one in rounds if one.prompt in validation], [one for one in rounds if one.prompt in test],
    )


def _tensors(rounds: list[Round]) -> FilterData:
    numbers = torch.tensor([one.number for one in rounds])
    return FilterData(
        torch.tensor([one.confidence for one in rounds], dtype=torch.float32),
        torch.tensor([one.final for one in rounds], dtype=torch.float32), 1 / numbers.bincount()[numbers],
    )


def _report(filter: PositionFilter, train: FilterData, test: FilterData) -> str:
    """Accuracy on held-out prompts, beside the best single threshold, and wrong acceptances."""
    with torch.no_grad():
        chances = filter(test.confidence).sigmoid()
    wrong = ~test.final.bool()
    false = float((chances > SURE)[wrong].float().mean()) if wrong.any() else 0.0
    plain = test.accuracy(test.confidence >= best_threshold(train))
    return (
        f"{len(test.final)} held-out forwards: {test.accuracy(chances > 0.5):.3f} of the positions right, with the "
        f"best single threshold {plain:.3f}; of those that are not final yet, {false:.3f} pass {SURE}."
    )


def best_threshold(data: FilterData) -> float:
    """The confidence above which proposals count as final with the fewest errors."""
    grid = torch.linspace(0, 1, 101)
    return float(max(grid, key=lambda threshold: data.accuracy(data.confidence >= threshold)))
