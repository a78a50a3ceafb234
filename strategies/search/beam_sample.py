"""Beam search whose candidates are sampled."""
from collections.abc import Iterator

import torch

from playground.algorithms.search.beams import Beams, Offer, compared
from playground.algorithms.speculative.without_replacement import RemainingTokens
from playground.contract import Decoder, Lane, Strategy, knob, make
from playground.events import Branches


class BeamSample(Decoder):
    """A beam search that samples its candidates instead of taking the best.

    At every step twice as many continuations as beams are drawn without replacement, in proportion to the probability
    of the whole text so far, and the most probable of these survive. So the beams follow probable texts but differ
    between runs. Useful where beam search gives repetitive text and plain sampling incoherent text. Samplers,
    penalties and constraints apply before the draw; probabilities are normalised after them, while the transformers
    library, which this otherwise follows, sums the processed scores unnormalised. Finished texts are ranked by
    sum / length ** length_exponent. Wolf et al. 2020, arXiv 1910.03771.
    """

    name, title, paper, sheet = "beam_sample", "Beam sampling", "1910.03771", "search/diverse-beam-search"
    guarantee = ("heuristic",)
    several = counts_forced = True

    beams: int = knob(4, 1, 64, step=1, help="sequences that grow in parallel")
    temperature: float = knob(1.0, 0.05, 5.0, step=0.05, help="below 1 sharpens, above 1 flattens")
    length_exponent: float = knob(
        1.0, 0.0, 2.0, step=0.1, help="0 ranks texts by summed log-probability, which favours short ones; 1 by the mean"
    )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        yield lm.prefill()
        beams = SampledBeams(lm.fork(1)[0], self.beams, self.length_exponent)
        beams.lm = lm
        while beams.live:
            rows = yield lm.extend([beam.leaf for beam in beams.live])
            logp = torch.stack([row.distribution().log() for row in rows])
            offers = beams.choose(logp, lm.ends)
            beams.follow(lm, offers, logp)
            yield lm.keep([lm.choose(rows[offer.place], offer.token, leaf=beam.leaf)
                           for offer, beam in zip(offers, beams.live)])
            beams.retire(lm)
            yield Branches(scores=beams.ranks(), sums=beams.sums())
        yield from compared(beams.finished)
        yield lm.keep(beams.finished[0].leaf)


class SampledBeams(Beams):
    """Beams whose candidates are drawn by the lane `lm`."""

    lm = None

    def _candidates(self, sums: torch.Tensor, ends) -> list[Offer]:
        """Twice as many candidates as beams, drawn without replacement, best first."""
        scores = sums.flatten()
        remaining, position = RemainingTokens(scores.softmax(0)), self.live[0].leaf.generated
        drawn = [self.lm.draw_remaining(remaining, position, "candidate")
                 for _ in range(min(2 * self.width, remaining.distinct))]
        drawn.sort(key=lambda place: (-float(scores[place]), place))
        return [Offer(*divmod(place, sums.shape[1]), float(scores[place])) for place in drawn]
