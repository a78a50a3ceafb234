"""Sequential Monte Carlo under a grammar: weighted particles that grow in parallel and are resampled by weight.

Subclasses of `Particles` decide when and how to resample. `Redrawn` resamples with replacement when the effective
sample size is low.
"""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from playground.contract import Decoder, Lane, Strategy, knob, make
from playground.errors import Refusal
from playground.events import Branches, Event, Figure, Note

NEVER = float("-inf")  # log of 0
SHOWN = 10  # texts in the bar chart
ROUNDING = 1e-9  # error of the effective sample size of equally weighted particles


@dataclass(eq=False)
class Particle:
    """A sequence and the log of its weight: the product of the probability mass that the grammar allowed per step."""

    leaf: object
    weight: float = 0.0

    @property
    def grows(self) -> bool:
        return not self.leaf.reason and self.weight > NEVER

    @property
    def whole(self) -> bool:
        return self.leaf.reason not in (None, "length")


class Particles(Decoder):
    """The population. A strategy implements `_resampled`, and overrides `_step` to sample tokens in its own way."""

    guarantee, needs, refuses = ("heuristic",), ("constraint",), ("sampler",)
    several = owns_constraint = True

    particles: int = knob(8, 1, 64, step=1, help="sequences that grow in parallel; 1 is a plain token mask")
    temperature: float = knob(
        1.0, 0.3, 1.5, step=0.05, help="of the target distribution; 1 is the model's own"
    )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        yield lm.prefill()
        particles, step = [Particle(leaf) for leaf in lm.fork(self.particles)], 0
        while any(particle.grows for particle in particles):
            particles = self._branched(lm, particles)
            yield from self._extended(lm, particles, step)
            step += 1
            yield from self._progress(particles, step)
            if alive(particles):
                particles = yield from self._resampled(lm, particles, step)
        yield from self._chosen(lm, particles)

    def _extended(self, lm: Lane, particles: list[Particle], step: int) -> Iterator:
        """One more token for every unfinished particle, in one forward."""
        growing = [particle for particle in particles if particle.grows]
        rows = yield lm.extend([particle.leaf for particle in growing])
        choices = yield from self._steps(lm, growing, rows)
        yield from self._step_events(lm, growing, step)
        yield lm.keep([choice for choice in choices if choice])
        lm.drop(particle.leaf for particle in growing if particle.weight == NEVER)
        self._cut(particles)

    def _steps(self, lm: Lane, growing: list[Particle], rows: list) -> Iterator:
        """The choice of each growing particle."""
        yield from ()
        return [self._step(lm, particle, row) for particle, row in zip(growing, rows)]

    def _branched(self, lm: Lane, particles: list[Particle]) -> list[Particle]:
        """The particles that take the next step; a subclass may branch them."""
        return particles

    def _step(self, lm: Lane, particle: Particle, rows):
        """Choose a token that the grammar allows, or None if there is none.

        The allowed probability mass, computed from the whole mask, is multiplied into the particle's weight.
        """
        allowed = rows.scores[0].cpu().double().log_softmax(-1).masked_fill(~rows.masks[0].cpu(), NEVER)
        particle.weight += float(allowed.logsumexp(0))
        if particle.weight == NEVER:
            return None
        rows.add_stage("mask", allowed[None])
        return lm.pick(rows)

    def _resampled(self, lm: Lane, particles: list[Particle], step: int) -> Iterator:
        """Return the particles that continue after a step. The sum of their weights has the same expectation."""
        raise NotImplementedError

    def _step_events(self, lm: Lane, growing: list[Particle], step: int) -> Iterator[Event]:
        """Events to show for a step besides the weights."""
        yield from ()

    def _marks(self, particles: list[Particle]) -> dict[str, float]:
        """Reference lines in the chart of the effective sample size."""
        return {}

    def _cut(self, particles: list[Particle]) -> None:
        """Set the weight of particles truncated by the length limit to 0, unless that would leave none."""
        cut = [particle for particle in particles if particle.leaf.reason == "length"]
        if len(cut) < len(alive(particles)):
            for particle in cut:
                particle.weight = NEVER

    def _progress(self, particles: list[Particle], step: int) -> Iterator[Event]:
        if not alive(particles):
            return
        yield Branches(scores={particle.leaf.number: particle.weight for particle in alive(particles)})
        data = {
            "x": step - 1,
            "axis": "step",
            "series": {"effective sample size": effective_size(particles)},
            "lines": self._marks(particles),
        }
        yield Figure("scalar", "effective sample size", data)

    def _cut_off(self, chosen: Particle) -> str:
        """Why no text is whole. Whether more tokens would help depends on the grammar, so no remedy is suggested."""
        return (
            f"Every text was truncated by the length limit of {chosen.leaf.generated} tokens before the grammar allowed"
            " an end and the model took it, so the answer is incomplete."
        )

    def _chosen(self, lm: Lane, particles: list[Particle]) -> Iterator:
        if not alive(particles):
            raise Refusal(
                "Every particle reached a dead end of the grammar, where it allows no token of this model: loosen it, "
                "or use more particles.",
                "constraint",
            )
        shares, found = normalised(particles), defaultdict(float)
        for particle, share in zip(particles, shares.tolist()):
            found[particle.leaf.text] += share
        labels, values = zip(*sorted(found.items(), key=lambda pair: -pair[1])[:SHOWN])
        yield Figure("bars", "texts by weight", {"labels": list(labels), "values": list(values)})
        chosen = particles[lm.draw(shares, max(len(particle.leaf.tokens) for particle in particles), "answer")]
        mass = f"The grammar allows an estimated {math.exp(mean(particles)):.3g} of the model's probability mass."
        yield Note(mass if chosen.whole else self._cut_off(chosen))
        yield lm.keep(chosen.leaf)


class Redrawn(Particles):
    """A population that is resampled with replacement when its effective sample size is low."""

    threshold: float = knob(
        0.5,
        0.0,
        1.0,
        step=0.05,
        help="resample if the effective sample size is below this share of the particles; 0 never, which is importance "
        "sampling",
    )

    def _resampled(self, lm: Lane, particles: list[Particle], step: int) -> Iterator:
        if effective_size(particles) >= self.threshold * len(particles) - ROUNDING:
            return particles
        size = effective_size(particles)
        yield Note(f"The effective sample size is {size:.1f} of {len(particles)}: all particles are resampled.")
        return self._copied(lm, particles)

    def _marks(self, particles: list[Particle]) -> dict[str, float]:
        return {"resampled below": self.threshold * len(particles)}

    def _copied(self, lm: Lane, particles: list[Particle]) -> list[Particle]:
        """As many particles, each a copy of one sampled by weight, all with the mean weight."""
        weight, shares = mean(particles), normalised(particles)
        position = max(len(particle.leaf.tokens) for particle in particles)
        drawn = [particles[lm.draw(shares, position, "ancestor")] for _ in particles]
        copies = [Particle(self._copy_leaf(lm, drawn, i), weight) for i in range(len(drawn))]
        taken = [particle.leaf for particle in drawn]
        lm.drop(particle.leaf for particle in alive(particles) if particle.leaf not in taken)
        return copies

    def _copy_leaf(self, lm: Lane, drawn: list[Particle], i: int):
        """The first copy continues in the sequence itself, further ones in forks; a finished sequence is shared."""
        leaf = drawn[i].leaf
        return leaf if leaf.reason or drawn[i] not in drawn[:i] else lm.fork(1, leaf)[0]


def alive(particles: list[Particle]) -> list[Particle]:
    return [particle for particle in particles if particle.weight > NEVER]


def weights(particles: list[Particle]) -> torch.Tensor:
    return torch.tensor([particle.weight for particle in particles], dtype=torch.float64)


def normalised(particles: list[Particle]) -> torch.Tensor:
    """Normalised weights, [particles]."""
    return weights(particles).softmax(0)


def mean(particles: list[Particle]) -> float:
    """Log of the mean weight."""
    return float(weights(particles).logsumexp(0)) - math.log(len(particles))


def effective_size(particles: list[Particle]) -> float:
    """Effective sample size, (sum w)^2 / sum w^2."""
    return float(1 / (normalised(particles) ** 2).sum())
