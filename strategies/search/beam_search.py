"""Beam search."""
from collections.abc import Iterator

from playground.algorithms.search.beams import Beams, compared, log_probabilities
from playground.contract import Decoder, Lane, knob
from playground.events import Branches, Figure


class BeamSearch(Decoder):
    """Grow several sequences in parallel and keep the most probable ones at every step.

    Of all continuations of all beams, the best `beams` by summed log-probability survive; a continuation that ends the
    text counts as finished if it is among them. The search is deterministic. Penalties and other samplers that do not
    draw act on every beam by its own text, and log-probabilities are normalised after them. Under a grammar the sums
    still use the model's own log-probabilities, including those of forced tokens and of the end token. Finished texts
    are ranked by sum / length ** length_exponent, as in the transformers library. Lowerre 1976; with neural models:
    Sutskever et al. 2014, arXiv 1409.3215.
    """

    name, title, paper, sheet = "beam_search", "Beam search", "1409.3215", "search/diverse-beam-search"
    guarantee, refuses = ("heuristic", "collapses"), ("drawing",)
    several = counts_forced = True

    beams: int = knob(4, 1, 64, step=1, help="sequences that grow in parallel; 1 is greedy")
    length_exponent: float = knob(
        1.0, 0.0, 2.0, step=0.1, help="0 ranks texts by summed log-probability, which favours short ones; 1 by the mean"
    )
    early_stop: bool = knob(
        False, help="stop at as many finished texts as beams, even if an unfinished one could still rank higher"
    )

    def decode(self, lm: Lane) -> Iterator:
        yield lm.prefill()
        beams = Beams(lm.fork(1)[0], self.beams, self.length_exponent, patient=not self.early_stop)
        while beams.live:
            rows = yield lm.extend([beam.leaf for beam in beams.live])
            logp = log_probabilities(rows)
            offers = beams.choose(logp, lm.ends)
            beams.follow(lm, offers, logp)
            yield lm.keep(
                [lm.choose(rows[offer.place], offer.token, leaf=beam.leaf) for offer, beam in zip(offers, beams.live)]
            )
            beams.retire(lm)
            yield Branches(scores=beams.ranks(), sums=beams.sums())
            yield self._candidates(lm, beams.considered, offers)
        yield from compared(beams.finished)
        yield lm.keep(beams.finished[0].leaf)

    def _candidates(self, lm: Lane, considered, taken) -> Figure:
        labels = [f"{'✓' if offer in taken else '–'} {offer.place + 1} {lm.piece(offer.token)}" for offer in considered]
        values = [offer.score for offer in considered]
        return Figure("bars", "beam and token, log-probability of the text", {"labels": labels, "values": values})
