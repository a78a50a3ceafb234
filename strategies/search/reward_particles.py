"""Particle filtering with a reward model."""
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from playground.algorithms.search.reasoning_steps import DELIMITERS, Reasoning, StepEnd, take_step
from playground.algorithms.search.rewards import Rewarded, classifier_knob, reward_knob
from playground.contract import Lane, Strategy, knob, make
from playground.events import Branches, Figure, Note

FLOOR = 1e-12  # smallest reward: its logarithm stays finite
ROUNDING = 1e-9  # error of the effective sample size of equally weighted particles


@dataclass(eq=False)
class ScoredParticle:
    """A sequence, the reward of its text so far, and the log of its weight."""

    reasoning: Reasoning
    reward: float
    weight: float = 0.0

    @property
    def grows(self) -> bool:
        return not self.reasoning.leaf.reason


class RewardParticles(Rewarded):
    """Grow several texts side by side, score each after every step with a process reward model, and resample them:
    texts with a high reward continue in several copies, others are dropped.

    A step is a line, or `step_tokens` tokens. With weights `current`, the rule of the paper, all particles are
    resampled after every step by r / (1 - r) to the power of `strength`, finished ones included, and the text with the
    highest reward is the answer. With `ratio`, the rewards are soft potentials of sequential Monte Carlo: a particle's
    weight is multiplied by (new reward / old reward) ** strength, particles are resampled when the effective sample
    size is below `threshold`, and the answer is drawn by weight. The answer then converges to the model's distribution
    times reward ** strength. One particle, or strength 0 without resampling, is plain sampling. Puri et al. 2025, arXiv
    2502.01618; the ratio form is that of twisted SMC, Zhao et al. 2024, arXiv 2404.17546.
    """

    name, title, paper, sheet = (
        "reward_particles",
        "Particle filter with a reward",
        "2502.01618",
        "search/self-consistency-bestofn",
    )
    guarantee, refuses, several, counts_forced = ("heuristic", "collapses"), ("sampler",), True, True

    particles: int = knob(4, 1, 64, step=1, help="texts that grow side by side; 1 is plain sampling")
    reward: str = reward_knob()
    classifier: str = classifier_knob()
    weights: str = knob(
        "current",
        choices=("current", "ratio"),
        help="current: by the present reward after every step; ratio: soft potentials, an unbiased particle filter",
    )
    strength: float = knob(1.0, 0.0, 10.0, step=0.1, help="exponent of the reward in the weights; 0 ignores it")
    threshold: float = knob(
        0.5, 0.0, 1.0, step=0.05, help="for ratio: resample below this share of effective particles; 0 never"
    )
    step: str = knob("line", choices=tuple(DELIMITERS), help="what ends a step")
    step_tokens: int = knob(48, 1, 512, step=1, help="tokens after which a step ends in any case")
    temperature: float = knob(0.8, 0.0, 2.0, step=0.05, help="of the sampled tokens; at 0 all particles are equal")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        row = yield lm.prefill()
        state = None if row.hidden is None else row.hidden[-1]
        begun = [
            Reasoning(leaf, row, state=state, way=f" {number}" if number else "")
            for number, leaf in enumerate(lm.fork(self.particles))
        ]
        [start] = yield from self.rewards(lm, [begun[0].text])  # of the prompt alone: the first ratio needs it
        particles, step = [ScoredParticle(each, start) for each in begun], 0
        while any(particle.grows for particle in particles):
            yield from self._extended(lm, particles)
            step += 1
            yield from self._shown(particles, step)
            particles = yield from self._resampled(lm, particles, step)
        chosen = self._answer(lm, particles)
        yield Note(f"After {step} steps the answer is a text with reward {chosen.reward:.2f}.")
        yield lm.keep(chosen.reasoning.leaf)

    def _extended(self, lm: Lane, particles: list[ScoredParticle]) -> Iterator:
        """One more step for every unfinished particle, and its weight."""
        growing = [particle for particle in particles if particle.grows]
        yield from take_step(
            lm, [particle.reasoning for particle in growing], StepEnd(DELIMITERS[self.step], self.step_tokens)
        )
        scores = yield from self.rewards(lm, [particle.reasoning.text for particle in growing])
        for particle, score in zip(growing, scores):
            particle.weight += self._potential(particle.reward, score)
            particle.reward = score

    def _potential(self, before: float, after: float) -> float:
        """Log of the factor by which a step changes a weight."""
        if self.weights == "current":
            return 0.0
        return self.strength * (math.log(max(after, FLOOR)) - math.log(max(before, FLOOR)))

    def _shares(self, particles: list[ScoredParticle]) -> torch.Tensor:
        """Normalised weights, [particles]."""
        if self.weights == "ratio":
            logs = [particle.weight for particle in particles]
        else:
            logs = [self.strength * _logit(particle.reward) for particle in particles]
        return torch.tensor(logs, dtype=torch.float64).softmax(0)

    def _resampled(self, lm: Lane, particles: list[ScoredParticle], step: int) -> Iterator:
        """The particles that take the next step."""
        shares = self._shares(particles)
        size = float(1 / (shares**2).sum())
        if self.weights == "ratio" and size >= self.threshold * len(particles) - ROUNDING:
            return particles
        if not any(particle.grows for particle in particles) or len(particles) == 1:
            return particles
        position = max(len(particle.reasoning.leaf.tokens) for particle in particles)
        drawn = [lm.draw(shares, position, f"ancestor {number}") for number in range(len(particles))]
        kept = sorted(set(drawn))
        yield Note(f"Step {step}: {len(kept)} of {len(particles)} texts continue, {len(drawn) - len(kept)} as copies.")
        leaves = [particles[number].reasoning.leaf for number in kept]  # a finished text may be shared by particles
        lm.drop({each.reasoning.leaf for each in particles if each.reasoning.leaf not in leaves})
        weight = self._mean(particles)
        return [copy for number in kept for copy in _copies(lm, particles[number], drawn.count(number), weight)]

    def _mean(self, particles: list[ScoredParticle]) -> float:
        """Log of the mean weight."""
        logs = torch.tensor([particle.weight for particle in particles], dtype=torch.float64)
        return float(logs.logsumexp(0)) - math.log(len(particles))

    def _answer(self, lm: Lane, particles: list[ScoredParticle]) -> ScoredParticle:
        """A text by weight, or the one with the highest reward; truncated ones only if all are."""
        whole = [particle for particle in particles if particle.reasoning.leaf.reason != "length"] or particles
        if self.weights == "current":
            return max(whole, key=lambda particle: particle.reward)
        position = max(len(particle.reasoning.leaf.tokens) for particle in whole)
        return whole[lm.draw(self._shares(whole), position, "answer")]

    def _shown(self, particles: list[ScoredParticle], step: int) -> Iterator:
        yield Branches(scores={each.reasoning.leaf.number: each.reward for each in particles})
        labels = [f"#{each.reasoning.leaf.number}" for each in particles]
        yield Figure("bars", "reward of each text", {"labels": labels, "values": [each.reward for each in particles]})
        shares = self._shares(particles)
        size = {"effective sample size": float(1 / (shares**2).sum())}
        yield Figure("scalar", "effective sample size", {"x": step - 1, "axis": "step", "series": size})


def _copies(lm: Lane, particle: ScoredParticle, count: int, weight: float) -> list[ScoredParticle]:
    """As many copies; a finished text is shared."""
    if not particle.grows:
        return [ScoredParticle(particle.reasoning, particle.reward, weight) for _ in range(count)]
    return [ScoredParticle(each, particle.reward, weight) for each in particle.reasoning.continued(lm, count)]


def _logit(p: float) -> float:
    p = min(max(p, FLOOR), 1 - FLOOR)
    return math.log(p) - math.log1p(-p)
