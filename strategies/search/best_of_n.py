"""Best of N."""
from collections.abc import Iterator
from itertools import accumulate

from playground.algorithms.search.parallel_samples import draw_many, whole
from playground.contract import Decoder, Strategy, knob, make
from playground.events import Branches, Figure


class BestOfN(Decoder):
    """Draw several texts by chance and keep the one the model itself finds most probable.

    All texts grow side by side from one reading of the prompt. Their score is the mean or the sum of the log-
    probabilities of their tokens, by the model as it is, before temperature and other samplers: the mean favours texts
    that repeat themselves, the sum short ones. A text cut off by the length counts only if all are; of equals the first
    is taken. With N texts the law moves from the sampler's by at most ln N - (N - 1) / N nats. Stiennon et al. 2020,
    arXiv 2009.01325; the bound: Beirami et al. 2024, arXiv 2401.01879.
    """

    name, title, paper, sheet = "best_of_n", "Best of N", "2009.01325", "search/self-consistency-bestofn"
    guarantee, several = ("heuristic", "collapses"), True

    n: int = knob(8, 1, 64, step=1, help="texts that are drawn; 1 is plain sampling")
    score: str = knob(
        "mean",
        choices=("mean", "sum"),
        help="the log-probability of a text: that of its tokens on average, or all in all",
    )
    temperature: float = knob(
        0.8, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; at 0 all texts are the greedy one"
    )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm) -> Iterator:
        samples = yield from draw_many(lm, self.n, self._standings)
        contenders = whole(samples)
        labels, best = [f"up to {sample.label}" for sample in contenders], accumulate(map(self._score, contenders), max)
        yield Figure("bars", "best score so far", {"labels": labels, "values": list(best)})
        yield lm.keep(max(contenders, key=self._score).leaf)

    def _score(self, sample) -> float:
        return sample.mean if self.score == "mean" else sample.logp

    def _standings(self, samples, completed) -> Iterator:
        yield Branches(scores={sample.leaf.number: self._score(sample) for sample in samples})
