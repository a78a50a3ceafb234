"""Stochastic beam search: sampling whole texts without replacement."""
import math
from collections.abc import Iterator

import torch

from playground.algorithms.search.beams import Beams, Offer, compared
from playground.contract import Decoder, Lane, Strategy, knob, make
from playground.events import Branches


class StochasticBeamSearch(Decoder):
    """Sample several different texts at once: a beam search over log-probabilities with Gumbel noise.

    The texts are drawn without replacement, as if texts were sampled one after another and repeats discarded, but none
    is generated twice. Each beam carries the largest perturbed log-probability of its continuations. Its first child
    inherits it, every further one gets a smaller value, conditioned on that; the `beams` largest survive. The text with
    the largest value is distributed like an ordinary sample, and is returned; the others are shown beside it. Useful to
    get varied texts where plain samples would mostly repeat the most probable one. beams = 1 is plain sampling. Kool et
    al. 2019, arXiv 1903.06059.
    """

    name, title, paper, sheet = (
        "stochastic_beam_search", "Stochastic beam search", "1903.06059", "search/stochastic-beams"
    )
    guarantee = ("heuristic", "collapses")
    several = counts_forced = True

    beams: int = knob(4, 1, 64, step=1, help="texts to sample without replacement; 1 is plain sampling")
    temperature: float = knob(1.0, 0.05, 5.0, step=0.05, help="below 1 sharpens, above 1 flattens")

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        yield lm.prefill()
        beams = Beams(lm.fork(1)[0], self.beams)
        beams.live[0].score = gumbel(lm.uniform(lm.generated, "root"))
        while beams.live:
            rows = yield lm.extend([beam.leaf for beam in beams.live])
            offers = [offer for place, row in enumerate(rows)
                      for offer in self.children(lm, row, beams.live[place], place)]
            offers = sorted(offers, key=lambda offer: -offer.score)[:self.beams]
            logp = torch.stack([row.distribution().log() for row in rows])
            beams.follow(lm, offers, logp)
            yield lm.keep([lm.choose(rows[offer.place], offer.token, leaf=beam.leaf)
                           for offer, beam in zip(offers, beams.live)])
            beams.retire(lm)
            yield Branches(scores=beams.ranks())
        yield from compared(beams.finished)
        yield lm.keep(beams.finished[0].leaf)

    def children(self, lm: Lane, row, beam, place: int) -> Iterator[Offer]:
        """The continuations of a beam with the largest perturbed log-probabilities, largest first."""
        left, position, score = row.distribution().clone(), beam.leaf.generated, beam.score
        for i in range(self.beams):
            mass = float(left.sum())
            if i and mass <= 0:
                return
            purpose = f"child/{beam.leaf.number}/{i}"
            token = lm.draw(left / mass, position, purpose) if i else lm.pick(row).token
            if i:
                score = gumbel(lm.uniform(position, purpose), beam.logp + math.log(mass), score)
            yield Offer(place, token, score)
            left[token] = 0.0


def gumbel(u: float, location: float = 0.0, most: float = math.inf) -> float:
    """A Gumbel variable with this location, conditioned to be at most `most`, from a uniform number."""
    return location - math.log(math.exp(location - most) - math.log(max(u, 1e-300)))
