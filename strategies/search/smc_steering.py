"""Sequential Monte Carlo steering: particles that are chosen without replacement."""
from collections.abc import Iterator
from itertools import pairwise
from math import log

import torch
from torch import Tensor

from playground.algorithms.search.particle_filter import NEVER, Particle, Particles, alive, mean, portions
from playground.contract import knob
from playground.events import Figure, Note

ROUNDING = 1e-12
SURE = 1 - 1e-9  # chance to stay, from which no lot is drawn
SHOWN = 24  # texts


class SMCSteering(Particles):
    """Grow several texts under a grammar, try several ways on from each at every step, and keep as many texts as there
    were, none of them twice.

    Every text that still grows takes the next step `n_beam` times, and weights are those of `smc`: the legal mass on
    the way. Of all that come of it a text stays with probability min(1, c w), where c makes that as many texts as there
    were. Those with c w >= 1 stay for sure and keep their weight, as the best beams do; the others draw lots in one go,
    which takes no text twice, and each that stays weighs 1 / c. So weights are right on average whatever is dropped;
    two that drew the same token still count as two. With one way on nothing is ever dropped: `smc` at threshold 0. The
    answer is drawn by weight. Lew et al. 2023, arXiv
    2306.03081; which texts stay is the optimal resampling of Fearnhead and Clifford 2003.
    """

    name, title, paper, sheet = "smc_steering", "SMC steering", "2306.03081", "search/self-consistency-bestofn"

    particles: int = knob(5, 1, 64, step=1, help="texts that are kept after every step")
    n_beam: int = knob(
        3, 1, 8, step=1, help="ways on that are tried from each of them; 1 drops none, which is importance sampling"
    )

    def _spread(self, lm, texts: list[Particle]) -> list[Particle]:
        """Every text that grows, `n_beam` times. One that does not is alone, and weighs more beside so many others."""
        growing = sum(particle.grows for particle in texts)
        share = log(len(texts) + growing * (self.n_beam - 1)) - log(len(texts))
        return [copy for particle in texts for copy in self._copies(lm, particle, share)]

    def _copies(self, lm, particle: Particle, share: float) -> list[Particle]:
        if not particle.grows:
            return [Particle(particle.leaf, particle.weight + share)]
        leaves = [particle.leaf, *lm.fork(self.n_beam - 1, particle.leaf)] if self.n_beam > 1 else [particle.leaf]
        return [Particle(leaf, particle.weight + share - log(self.n_beam)) for leaf in leaves]

    def _renewed(self, lm, texts: list[Particle], turn: int) -> Iterator:
        """`particles` of the texts, at least those that weigh anything where they are no more than that."""
        stay = chances(portions(texts), self.particles)
        kept = self._kept(lm, texts, stay)
        share, threshold = log(self.particles) - log(len(texts)), self._threshold(texts, stay)
        lm.drop(particle.leaf for i, particle in enumerate(texts) if i not in kept and particle.weight > NEVER)
        yield from self._shown(texts, stay, kept, turn)
        for i in kept:
            texts[i].weight = share + (texts[i].weight if stay[i] >= SURE else threshold)
        dead = [particle for particle in texts if particle.weight == NEVER]
        return [texts[i] for i in kept] + dead[:self.particles - len(kept)]

    def _threshold(self, texts: list[Particle], stay: Tensor) -> float:
        """Log of 1 / c, the weight of a text that stays by lot; anything where no lots are drawn."""
        unsure = [i for i in range(len(texts)) if 0 < stay[i] < SURE]
        return texts[unsure[0]].weight - log(float(stay[unsure[0]])) if unsure else NEVER

    def _kept(self, lm, texts: list[Particle], stay: Tensor) -> list[int]:
        """Indices of the texts that stay, in their order."""
        unsure = [i for i in range(len(texts)) if 0 < stay[i] < SURE]
        outcomes = lots(stay[unsure].tolist())
        position = max(len(particle.leaf.tokens) for particle in texts)
        taken = outcomes[lm.draw(torch.tensor([p for p, _ in outcomes], dtype=torch.float64), position, "lots")][1]
        return sorted([i for i in range(len(texts)) if stay[i] >= SURE] + [unsure[i] for i in taken])

    def _shown(self, texts: list[Particle], stay: Tensor, kept: list[int], turn: int) -> Iterator:
        """What is to be seen of a choice among texts."""
        sure = sum(bool(p >= SURE) for p in stay)
        yield Figure(
            "scalar",
            "texts kept",
            {
                "x": turn - 1,
                "axis": "step",
                "series": {"for sure": sure, "by lot": len(kept) - sure},
                "lines": {"tried": len(alive(texts))},
            },
        )
        yield Figure(
            "scalar",
            "log of the legal mass, as estimated",
            {"x": turn - 1, "axis": "step", "series": {"log of the mean weight": mean(texts)}},
        )
        named = [i for i in range(len(texts)) if texts[i].weight > NEVER]
        labels = [f"#{texts[i].leaf.number}{'' if i in kept else ' dropped'}" for i in named[:SHOWN]]
        yield Figure("bars", "chance of each text to stay", {"labels": labels, "values": stay[named[:SHOWN]].tolist()})
        if len(kept) < len(named):
            yield Note(f"{len(named)} ways on, {len(kept)} of them kept: {sure} for sure, {len(kept) - sure} by lot.")

    def _marks(self, texts: list[Particle]) -> dict[str, float]:
        return {"texts that are kept": self.particles}


def chances(shares: Tensor, count: int) -> Tensor:
    """Chances min(1, c w) to stay, [n], of texts with shares w [n] of all the weight. They add up to `count`; all stay
    that weigh anything where those are no more."""
    if int((shares > 0).sum()) <= count:
        return (shares > 0).double()
    falling, sure = shares.sort(descending=True).values, 0
    while falling[sure] * (count - sure) >= falling[sure:].sum():
        sure += 1
    return (shares * (count - sure) / falling[sure:].sum()).clamp(max=1.0)


def lots(stay: list[float]) -> list[tuple[float, list[int]]]:
    """All outcomes of one lot for everybody, [(probability, indices that stay)], for chances below 1 that add up to a
    whole number.

    The chances lie side by side, and marks one apart, from a random start, point at those that stay: at nobody twice.
    """
    ends = torch.tensor([0.0, *stay], dtype=torch.float64).cumsum(0)
    marks = torch.arange(round(float(ends[-1])), dtype=torch.float64)
    starts = sorted({0.0, *(ends % 1).tolist()[:-1], 1.0})
    stretches = [(before, after) for before, after in pairwise(starts) if after - before > ROUNDING]
    return [
        (after - before, torch.searchsorted(ends[1:], (before + after) / 2 + marks, right=True).tolist())
        for before, after in stretches
    ]
