"""Best of N."""
from collections.abc import Iterator
from itertools import accumulate

from playground.algorithms.search.parallel_samples import draw_many, whole
from playground.algorithms.search.rewards import Rewarded, classifier_knob
from playground.contract import Lane, Strategy, knob, make
from playground.events import Branches, Figure


class BestOfN(Rewarded):
    """Sample several texts and keep the one with the highest score: its probability, or the reward of a model.

    All samples share one prefill. The score is the mean or the sum of the tokens' log-probabilities under the
    unmodified model, before temperature and other samplers: the mean favours repetitive texts, the sum short ones. Or
    it is the reward of the small model fitted to this target, or of any sequence-classification model, which both read
    the complete texts. A text truncated by the length limit counts only if all are; ties go to the first. The KL
    divergence of the output distribution from the sampler's is at most ln N - (N - 1) / N nats for N samples. Stiennon
    et al. 2020, arXiv 2009.01325; the bound: Beirami et al. 2024, arXiv 2401.01879.
    """

    name, title, paper, sheet = "best_of_n", "Best of N", "2009.01325", "search/self-consistency-bestofn"
    guarantee = ("heuristic", "collapses")
    several = counts_forced = True
    judge, falls_back = "outcome", False

    n: int = knob(8, 1, 64, step=1, help="texts to sample; 1 is plain sampling")
    score: str = knob(
        "mean",
        choices=("mean", "sum", "fitted", "classifier"),
        help="log-probability of a text, mean per token or sum over all; or the reward of the small model trained for "
        "this target, or of a sequence-classification model",
    )
    classifier: str = classifier_knob()
    temperature: float = knob(
        0.8, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; at 0 every text is the greedy one"
    )

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        samples = yield from draw_many(lm, self.n, self._progress)
        candidates = whole(samples)
        scores = yield from self._scores(lm, candidates)
        labels = [f"up to {sample.label}" for sample in candidates]
        yield Figure("bars", "best score so far", {"labels": labels, "values": list(accumulate(scores, max))})
        best = max(range(len(candidates)), key=scores.__getitem__)
        yield lm.keep(candidates[best].leaf)

    @property
    def reward_name(self) -> str:
        return self.score

    def _scores(self, lm: Lane, samples) -> Iterator:
        """Scores of complete texts."""
        if not self.rewarded:
            return [self._score(sample) for sample in samples]
        scores = yield from self.rewards(lm, [sample.rewarded for sample in samples])
        yield Branches(scores={sample.leaf.number: score for sample, score in zip(samples, scores)})
        labels = [sample.label for sample in samples]
        yield Figure("bars", "reward of each text", {"labels": labels, "values": scores})
        return scores

    def _score(self, sample) -> float:
        return sample.logp if self.score == "sum" else sample.mean

    def _progress(self, samples, completed) -> Iterator:
        yield Branches(scores={sample.leaf.number: self._score(sample) for sample in samples})
