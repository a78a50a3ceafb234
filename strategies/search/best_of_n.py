"""Best of N."""
from collections.abc import Iterator
from itertools import accumulate

from playground.algorithms.search.parallel_samples import draw_many, whole
from playground.contract import Decoder, Strategy, knob, make
from playground.events import Branches, Figure


class BestOfN(Decoder):
    """Sample several texts and keep the one with the highest log-probability under the model.

    All samples share one prefill. The score is the mean or the sum of the tokens' log-probabilities under the
    unmodified model, before temperature and other samplers: the mean favours repetitive texts, the sum short ones. A
    text truncated by the length limit counts only if all are; ties go to the first. The KL divergence of the output
    distribution from the sampler's is at most ln N - (N - 1) / N nats for N samples. Stiennon et al. 2020, arXiv
    2009.01325; the bound: Beirami et al. 2024, arXiv 2401.01879.
    """

    name, title, paper, sheet = "best_of_n", "Best of N", "2009.01325", "search/self-consistency-bestofn"
    guarantee = ("heuristic", "collapses")
    several = counts_forced = True

    n: int = knob(8, 1, 64, step=1, help="texts to sample; 1 is plain sampling")
    score: str = knob(
        "mean",
        choices=("mean", "sum"),
        help="log-probability of a text: mean per token, or sum over all tokens",
    )
    temperature: float = knob(
        0.8, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; at 0 every text is the greedy one"
    )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        samples = yield from draw_many(lm, self.n, self._progress)
        candidates = whole(samples)
        labels, best = [f"up to {sample.label}" for sample in candidates], accumulate(map(self._score, candidates), max)
        yield Figure("bars", "best score so far", {"labels": labels, "values": list(best)})
        yield lm.keep(max(candidates, key=self._score).leaf)

    def _score(self, sample) -> float:
        return sample.mean if self.score == "mean" else sample.logp

    def _progress(self, samples, completed) -> Iterator:
        yield Branches(scores={sample.leaf.number: self._score(sample) for sample in samples})
