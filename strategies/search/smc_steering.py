"""Sequential Monte Carlo steering: particles resampled without replacement."""
from collections.abc import Iterator
from itertools import pairwise
from math import log

import torch
from torch import Tensor

from playground.algorithms.search.particle_filter import NEVER, Particle, Particles, alive, mean, normalised
from playground.contract import Lane, knob
from playground.events import Figure, Note

ROUNDING = 1e-12
SURE = 1 - 1e-9  # survival probability above which a particle survives deterministically
SHOWN = 24  # particles


class SMCSteering(Particles):
    """Sample several continuations of every particle under a grammar, and resample to the original number without
    replacement.

    Every unfinished particle is continued `n_beam` times; weights are those of `smc`, the probability mass that the
    grammar allowed. A continuation survives with probability min(1, c w), where c makes the expected number of
    survivors the number of particles. Those with c w >= 1 survive for certain and keep their weight, like the best
    beams; the others are chosen by systematic resampling, and each survivor gets weight 1 / c. The weights therefore
    stay unbiased; two continuations with the same token count as two. With n_beam 1 no particle is ever dropped, which
    is `smc` at threshold 0. The answer is sampled by weight. Lew et al. 2023, arXiv 2306.03081; the choice of survivors
    is the optimal resampling of Fearnhead and Clifford 2003.
    """

    name, title, paper, sheet = "smc_steering", "SMC steering", "2306.03081", "search/self-consistency-bestofn"

    particles: int = knob(5, 1, 64, step=1, help="particles that survive each step")
    n_beam: int = knob(
        3, 1, 8, step=1, help="continuations sampled from each particle; 1 drops none, which is importance sampling"
    )

    def _branched(self, lm: Lane, particles: list[Particle]) -> list[Particle]:
        """Copy every unfinished particle `n_beam` times. A finished one stays single; its weight is scaled up."""
        growing = sum(particle.grows for particle in particles)
        share = log(len(particles) + growing * (self.n_beam - 1)) - log(len(particles))
        return [copy for particle in particles for copy in self._copies(lm, particle, share)]

    def _copies(self, lm: Lane, particle: Particle, share: float) -> list[Particle]:
        if not particle.grows:
            return [Particle(particle.leaf, particle.weight + share)]
        leaves = [particle.leaf, *lm.fork(self.n_beam - 1, particle.leaf)] if self.n_beam > 1 else [particle.leaf]
        return [Particle(leaf, particle.weight + share - log(self.n_beam)) for leaf in leaves]

    def _resampled(self, lm: Lane, particles: list[Particle], step: int) -> Iterator:
        """Choose `particles` survivors; all particles with nonzero weight if there are no more than that."""
        stay = survival_probabilities(normalised(particles), self.particles)
        kept = self._survivors(lm, particles, stay)
        share, threshold = log(self.particles) - log(len(particles)), self._threshold(particles, stay)
        lm.drop(particle.leaf for i, particle in enumerate(particles) if i not in kept and particle.weight > NEVER)
        yield from self._shown(particles, stay, kept, step)
        for i in kept:
            particles[i].weight = share + (particles[i].weight if stay[i] >= SURE else threshold)
        dead = [particle for particle in particles if particle.weight == NEVER]
        return [particles[i] for i in kept] + dead[:self.particles - len(kept)]

    def _threshold(self, particles: list[Particle], stay: Tensor) -> float:
        """Log of 1 / c, the weight of a survivor chosen at random; unused if none is chosen at random."""
        unsure = [i for i in range(len(particles)) if 0 < stay[i] < SURE]
        return particles[unsure[0]].weight - log(float(stay[unsure[0]])) if unsure else NEVER

    def _survivors(self, lm: Lane, particles: list[Particle], stay: Tensor) -> list[int]:
        """Indices of the survivors, in ascending order."""
        unsure = [i for i in range(len(particles)) if 0 < stay[i] < SURE]
        outcomes = systematic_outcomes(stay[unsure].tolist())
        position = max(len(particle.leaf.tokens) for particle in particles)
        taken = outcomes[lm.draw(torch.tensor([p for p, _ in outcomes], dtype=torch.float64), position, "lots")][1]
        return sorted([i for i in range(len(particles)) if stay[i] >= SURE] + [unsure[i] for i in taken])

    def _shown(self, particles: list[Particle], stay: Tensor, kept: list[int], step: int) -> Iterator:
        """Figures and a note about one resampling step."""
        sure = sum(bool(p >= SURE) for p in stay)
        yield Figure(
            "scalar",
            "particles that survive",
            {
                "x": step - 1,
                "axis": "step",
                "series": {"certain": sure, "random": len(kept) - sure},
                "lines": {"continuations": len(alive(particles))},
            },
        )
        yield Figure(
            "scalar",
            "log of the allowed mass, estimated",
            {"x": step - 1, "axis": "step", "series": {"log of the mean weight": mean(particles)}},
        )
        named = [i for i in range(len(particles)) if particles[i].weight > NEVER]
        labels = [f"#{particles[i].leaf.number}{'' if i in kept else ' dropped'}" for i in named[:SHOWN]]
        yield Figure("bars", "survival probability", {"labels": labels, "values": stay[named[:SHOWN]].tolist()})
        if len(kept) < len(named):
            yield Note(
                f"{len(kept)} of {len(named)} continuations survive: {sure} for certain, {len(kept) - sure} at random."
            )

    def _marks(self, particles: list[Particle]) -> dict[str, float]:
        return {"particles that survive": self.particles}


def survival_probabilities(shares: Tensor, count: int) -> Tensor:
    """Survival probabilities min(1, c w), [n], of particles with normalised weights w [n].

    They sum to `count`. If at most `count` particles have nonzero weight, all of those survive.
    """
    if int((shares > 0).sum()) <= count:
        return (shares > 0).double()
    falling, sure = shares.sort(descending=True).values, 0
    while falling[sure] * (count - sure) >= falling[sure:].sum():
        sure += 1
    return (shares * (count - sure) / falling[sure:].sum()).clamp(max=1.0)


def systematic_outcomes(stay: list[float]) -> list[tuple[float, list[int]]]:
    """All outcomes of one systematic resampling step, [(probability, surviving indices)].

    `stay` are survival probabilities below 1 that sum to an integer. They form consecutive intervals, and points at
    unit distance from a random start select the survivors, so none is selected twice.
    """
    ends = torch.tensor([0.0, *stay], dtype=torch.float64).cumsum(0)
    marks = torch.arange(round(float(ends[-1])), dtype=torch.float64)
    starts = sorted({0.0, *(ends % 1).tolist()[:-1], 1.0})
    stretches = [(before, after) for before, after in pairwise(starts) if after - before > ROUNDING]
    return [
        (after - before, torch.searchsorted(ends[1:], (before + after) / 2 + marks, right=True).tolist())
        for before, after in stretches
    ]
