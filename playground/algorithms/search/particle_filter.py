"""Sequential Monte Carlo under a grammar: texts that grow side by side, with weights, and are drawn anew by them.

When and how texts are drawn anew is left to those that build on it: `Redrawn` does it where few of them count, with
replacement.
"""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from playground.contract import Decoder, Strategy, knob, make
from playground.errors import Refusal
from playground.events import Branches, Event, Figure, Note

NEVER = float("-inf")  # log of 0
SHOWN = 10  # texts
ROUNDING = 1e-9  # of a number of equally heavy texts


@dataclass(eq=False)
class Particle:
    """A text and the log of its weight: of the chance, so far, that free writing would have stayed legal where this one
    was led.
    """

    leaf: object
    weight: float = 0.0

    @property
    def grows(self) -> bool:
        return not self.leaf.reason and self.weight > NEVER

    @property
    def whole(self) -> bool:
        return self.leaf.reason not in (None, "length")


class Particles(Decoder):
    """The population; a strategy writes `_renewed`, and `_step` where it has its own way to a legal token."""

    guarantee, needs, refuses = ("heuristic",), ("constraint",), ("sampler",)
    several = owns_constraint = True

    particles: int = knob(8, 1, 64, step=1, help="texts that grow side by side; 1 is a plain mask")
    temperature: float = knob(
        1.0, 0.3, 1.5, step=0.05, help="of the model whose law is aimed at; 1 is the model itself"
    )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        yield lm.prefill()
        texts, turn = [Particle(leaf) for leaf in lm.fork(self.particles)], 0
        while any(particle.grows for particle in texts):
            texts = self._spread(lm, texts)
            yield from self._grown(lm, texts, turn)
            turn += 1
            yield from self._standing(texts, turn)
            if alive(texts):
                texts = yield from self._renewed(lm, texts, turn)
        yield from self._chosen(lm, texts)

    def _grown(self, lm, texts: list[Particle], turn: int) -> Iterator:
        """A token more for every text that grows, all in one forward."""
        growing = [particle for particle in texts if particle.grows]
        rows = yield lm.extend([particle.leaf for particle in growing])
        choices = [self._step(lm, particle, row) for particle, row in zip(growing, rows)]
        yield from self._told(lm, growing, turn)
        yield lm.keep([choice for choice in choices if choice])
        lm.drop(particle.leaf for particle in growing if particle.weight == NEVER)
        self._cut(texts)

    def _spread(self, lm, texts: list[Particle]) -> list[Particle]:
        """The texts that take the next step, where those are not just the ones there are."""
        return texts

    def _step(self, lm, particle: Particle, rows):
        """A legal token to be kept, None where there is none; the legal mass, read off the whole mask, is multiplied
        into the weight.
        """
        legal = rows.scores[0].cpu().double().log_softmax(-1).masked_fill(~rows.masks[0].cpu(), NEVER)
        particle.weight += float(legal.logsumexp(0))
        if particle.weight == NEVER:
            return None
        rows.decide("mask", legal[None])
        return lm.pick(rows)

    def _renewed(self, lm, texts: list[Particle], turn: int) -> Iterator:
        """Return the texts that go on after a step. Their weights have the same sum on average."""
        raise NotImplementedError

    def _told(self, lm, growing: list[Particle], turn: int) -> Iterator[Event]:
        """What is to be shown of a step besides the weights."""
        yield from ()

    def _marks(self, texts: list[Particle]) -> dict[str, float]:
        """Lines beside the effective number of texts."""
        return {}

    def _cut(self, texts: list[Particle]) -> None:
        """What the length cut off weighs nothing; where that would leave no text at all, those cut off stay as they
        are.
        """
        cut = [particle for particle in texts if particle.leaf.reason == "length"]
        if len(cut) < len(alive(texts)):
            for particle in cut:
                particle.weight = NEVER

    def _standing(self, texts: list[Particle], turn: int) -> Iterator[Event]:
        if not alive(texts):
            return
        yield Branches(scores={particle.leaf.number: particle.weight for particle in alive(texts)})
        data = {
            "x": turn - 1,
            "axis": "step",
            "series": {"texts that count": effective(texts)},
            "lines": self._marks(texts),
        }
        yield Figure("scalar", "effective number of texts", data)

    def _chosen(self, lm, texts: list[Particle]) -> Iterator:
        if not alive(texts):
            raise Refusal(
                "The grammar led every text into a dead end: loosen it, take more particles, or raise the temperature.",
                "constraint",
            )
        shares, found = portions(texts), defaultdict(float)
        for particle, share in zip(texts, shares.tolist()):
            found[particle.leaf.text] += share
        labels, values = zip(*sorted(found.items(), key=lambda pair: -pair[1])[:SHOWN])
        yield Figure("bars", "texts, by their weight", {"labels": list(labels), "values": list(values)})
        chosen = texts[lm.draw(shares, max(len(particle.leaf.tokens) for particle in texts), "answer")]
        mass = f"About {math.exp(mean(texts)):.3g} of what the model writes freely is legal."
        yield Note(mass if chosen.whole else "The length cut every text off before its end: raise it.")
        yield lm.keep(chosen.leaf)


class Redrawn(Particles):
    """A population that is drawn anew from itself, with replacement, where few of its texts count."""

    threshold: float = knob(
        0.5,
        0.0,
        1.0,
        step=0.05,
        help="draw anew where fewer than this share of them count; 0 never, which is importance sampling",
    )

    def _renewed(self, lm, texts: list[Particle], turn: int) -> Iterator:
        if effective(texts) >= self.threshold * len(texts) - ROUNDING:
            return texts
        yield Note(f"Only {effective(texts):.1f} of {len(texts)} texts count: as many are drawn anew by their weights.")
        return self._redrawn(lm, texts)

    def _marks(self, texts: list[Particle]) -> dict[str, float]:
        return {"drawn anew below": self.threshold * len(texts)}

    def _redrawn(self, lm, texts: list[Particle]) -> list[Particle]:
        """As many particles, each a copy of one drawn by weight, and all of the mean weight."""
        weight, shares, position = mean(texts), portions(texts), max(len(particle.leaf.tokens) for particle in texts)
        drawn = [texts[lm.draw(shares, position, "ancestor")] for _ in texts]
        copies = [Particle(self._heir(lm, drawn, i), weight) for i in range(len(drawn))]
        taken = [particle.leaf for particle in drawn]
        lm.drop(particle.leaf for particle in alive(texts) if particle.leaf not in taken)
        return copies

    def _heir(self, lm, drawn: list[Particle], i: int):
        """The first copy goes on in the sequence itself; a text that has ended needs no other."""
        leaf = drawn[i].leaf
        return leaf if leaf.reason or drawn[i] not in drawn[:i] else lm.fork(1, leaf)[0]


def alive(texts: list[Particle]) -> list[Particle]:
    return [particle for particle in texts if particle.weight > NEVER]


def weights(texts: list[Particle]) -> torch.Tensor:
    return torch.tensor([particle.weight for particle in texts], dtype=torch.float64)


def portions(texts: list[Particle]) -> torch.Tensor:
    """Share of each text in the sum of the weights, [texts]."""
    return weights(texts).softmax(0)


def mean(texts: list[Particle]) -> float:
    """Log of the mean weight."""
    return float(weights(texts).logsumexp(0)) - math.log(len(texts))


def effective(texts: list[Particle]) -> float:
    """As many equally heavy texts would say as much: (sum w)^2 / sum w^2."""
    return float(1 / (portions(texts) ** 2).sum())
