"""Will a guess stand? A head on the draft's hidden states that has learnt to tell, and a tally of how often such words
were right.

The head is the one of SpecDec++, Huang et al. 2024, arXiv 2405.19715: residual blocks e + SiLU(W e + b) and two logits,
for refused and accepted. Theirs repeats one block, so that all share their weights; here each has its own.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import logsigmoid, silu

from playground.errors import Refusal
from playground.events import Figure, Note

BINS = 10  # of a probability, all equally wide
PRIOR = 2.0  # guesses a bin is taken to have seen already, standing as often as was said
REFUSED, ACCEPTED = 0, 1
HELD_OUT = 10  # one text in so many is not learnt from
FEW = 20  # texts


class Guesses(NamedTuple):
    """Tokens a draft model drew after what the target wrote in one text, and how a target takes them."""

    states: Tensor  # [n, width], what the draft's head reads once a guess has been fed
    chances: Tensor  # [n], min(1, p / q): that the guess stands, those before it having stood


@dataclass(frozen=True)
class Training:
    """How the head is learnt. The paper's settings where it has any; epochs and rate are for some ten thousand guesses.
    """

    blocks: int = 3  # 0 to 4
    weight: float = 6.0  # of what was refused, 1 to 12: most guesses stand
    epochs: int = 12
    rate: float = 1e-3  # falls to nothing along a cosine
    batch: int = 256  # guesses


class AcceptanceHead(Module):
    """Says of a draft's states [n, width] how probably the guesses stand that were fed there."""

    def __init__(self, width: int, blocks: int, chance: torch.Generator | None = None):
        super().__init__()
        self.blocks, self.read = ModuleList(Linear(width, width) for _ in range(blocks)), Linear(width, 2)
        with torch.no_grad():
            for weights in self.parameters():  # blocks begin as if they were not there
                weights.zero_()
            self.read.weight.normal_(std=width ** -0.5, generator=chance)

    @classmethod
    def of(cls, weights: dict[str, Tensor]) -> AcceptanceHead:
        """The head with these weights, by the names of `state_dict`."""
        blocks = sum(name.startswith("blocks.") and name.endswith(".weight") for name in weights)
        head = cls(weights["read.weight"].shape[1], blocks)
        head.load_state_dict(weights)
        return head.requires_grad_(False)

    def forward(self, states: Tensor) -> Tensor:
        """Logarithm of the odds that each stands, [n]."""
        for block in self.blocks:
            states = states + silu(block(states))
        logits = self.read(states)
        return logits[..., ACCEPTED] - logits[..., REFUSED]

    def chances(self, states: Tensor) -> Tensor:
        """That each stands, [n]."""
        weights = self.read.weight
        return self(states.to(weights)).sigmoid()


def loss(odds: Tensor, chances: Tensor, weight: float = 1.0) -> Tensor:
    """Cross-entropy of log-odds [n] with chances [n], a refusal counting `weight` times, by the sum of all that counts.
    """
    refused = weight * (1 - chances)
    return -(chances * logsigmoid(odds) + refused * logsigmoid(-odds)).sum() / (chances + refused).sum()


def constant_loss(chances: Tensor) -> float:
    """The same, unweighted, for who says the mean of the chances [n] of every guess: nobody who says one number does
    better.
    """
    mean = chances.mean().clamp(1e-6, 1 - 1e-6)
    return float(loss(mean.logit().expand_as(chances), chances))


def learn(texts: list[Guesses], training: Training, seed: int) -> Iterator[Figure | Note]:
    """Learn a head and return its weights by name; yields its loss on texts that are held out. The same seed gives the
    same head. Raises Refusal.
    """
    if len(texts) < FEW:
        raise Refusal(
            f"A head is learnt from the guesses in at least {FEW} texts, and there are {len(texts)}: give more.",
            "texts",
        )
    taught = _joined([text for i, text in enumerate(texts) if i % HELD_OUT])
    held_out = _joined(texts[::HELD_OUT])
    chance = torch.Generator().manual_seed(seed)
    head = AcceptanceHead(taught.states.shape[1], training.blocks, chance)
    yield _measured(0, head, held_out)
    for epoch, _ in enumerate(_epochs(head, taught, training, chance), 1):
        yield _measured(epoch, head, held_out, training.weight)
    with torch.no_grad():
        # refusals counted so many times; now a chance is a chance again
        head.read.bias[ACCEPTED] += log(training.weight)
    yield _judged(head, taught, held_out)
    return head.requires_grad_(False).state_dict()


def _joined(texts: list[Guesses]) -> Guesses:
    return Guesses(*(torch.cat(part).float() for part in zip(*texts)))


def _epochs(head: AcceptanceHead, taught: Guesses, training: Training, chance: torch.Generator) -> Iterator[None]:
    optimiser = torch.optim.AdamW(head.parameters(), training.rate)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, training.epochs)
    for _ in range(training.epochs):
        for rows in torch.randperm(len(taught.chances), generator=chance).split(training.batch):
            loss(head(taught.states[rows]), taught.chances[rows], training.weight).backward()
            optimiser.step()
            optimiser.zero_grad()
        falling.step()
        yield


def _measured(epoch: int, head: AcceptanceHead, held_out: Guesses, weight: float = 1.0) -> Figure:
    """Unweighted loss on held-out guesses, with the odds put right that the weight has shifted."""
    with torch.no_grad():
        found = float(loss(head(held_out.states) + log(weight), held_out.chances))
    return Figure("scalar", "loss of the head", {"x": epoch, "axis": "epoch", "series": {"held-out loss": found},
                                                 "lines": {"one chance for all": constant_loss(held_out.chances)}})


def _judged(head: AcceptanceHead, taught: Guesses, held_out: Guesses) -> Note:
    with torch.no_grad():
        found = float(loss(head(held_out.states), held_out.chances))
    return Note(
        f"Learnt from {len(taught.chances)} guesses, of which {float(taught.chances.mean()):.0%} stand. On {len(held_out.chances)} others its loss is "
        f"{found:.3f} nats, and {constant_loss(held_out.chances):.3f} for who says the same chance of each."
    )


class Reliability:
    """How often guesses stood, by the probability they were given: at first what was said, later what was seen."""

    def __init__(self):
        self.seen, self.stood = [0] * BINS, [0] * BINS

    def chance(self, said: float) -> float:
        """That a guess stands of which that was said."""
        place = self._place(said)
        return (PRIOR * said + self.stood[place]) / (PRIOR + self.seen[place])

    def learn(self, said: float, stood: bool) -> None:
        place = self._place(said)
        self.seen[place] += 1
        self.stood[place] += stood

    def figure(self, by: str) -> Figure:
        """The bins that have seen a guess; `by` names what was said."""
        known = [place for place in range(BINS) if self.seen[place]]
        labels = [
            f"{100 * place // BINS} to {100 * (place + 1) // BINS} % ({self.seen[place]} guesses)" for place in known
        ]
        return Figure("bars", f"share of guesses that stood, by {by}",
                      {"labels": labels, "values": [self.stood[place] / self.seen[place] for place in known]})

    def _place(self, said: float) -> int:
        return min(BINS - 1, int(said * BINS))
