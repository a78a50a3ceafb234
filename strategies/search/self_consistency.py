"""Self-consistency."""
import math
from collections.abc import Iterator

from playground.algorithms.search.answer_votes import answer_in, answer_knob, by_answer, elected, words_knob
from playground.algorithms.search.parallel_samples import draw_many, whole
from playground.algorithms.search.rewards import Rewarded, classifier_knob
from playground.contract import Lane, Strategy, knob, make
from playground.events import Branches, Figure, Note


class SelfConsistency(Rewarded):
    """Sample several chains of reasoning, extract the answer of each, and take the majority vote.

    Ties go to the answer whose texts have the larger summed log-probability, then to the first. The result is the most
    probable text with the winning answer. A text without an answer does not vote, nor does one truncated by the length
    limit unless all are, which is our rule. Votes may be weighted by the probability per token of the text, so that one
    confident text can outvote two uncertain ones, or by the reward of a model, which is weighted best of N. Wang et al.
    2022, arXiv 2203.11171; weights by reward: Li et al. 2022, arXiv 2206.02336.
    """

    name, title, paper, sheet = "self_consistency", "Self-consistency", "2203.11171", "search/self-consistency-bestofn"
    guarantee = ("heuristic", "collapses")
    several = counts_forced = True
    judge, falls_back = "outcome", False
    _weights = None  # reward of each text, by sequence number

    n: int = knob(8, 1, 64, step=1, help="texts to sample; 1 is plain sampling")
    answer: str = answer_knob()
    words: int = words_knob()
    temperature: float = knob(
        0.7, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; at 0 every text is the greedy one"
    )

    vote: str = knob(
        "majority",
        choices=("majority", "weighted", "fitted", "classifier"),
        help="each text counts once; or by the geometric mean of its tokens' probabilities; or by the reward of the "
        "small model trained for this target, or of a sequence-classification model",
    )
    classifier: str = classifier_knob()

    @property
    def reward_name(self) -> str:
        return self.vote

    def toggles(self) -> list[Strategy]:
        return [make("temperature", t=self.temperature)]

    def decode(self, lm: Lane) -> Iterator:
        samples = yield from draw_many(lm, self.n, self._progress)
        yield from self._weigh(lm, whole(samples))
        votes = self._votes(samples)
        voters = votes[self._winner(votes)] if votes else whole(samples)
        yield Note(self._outcome(samples, votes))
        yield lm.keep(max(voters, key=lambda sample: sample.logp).leaf)

    def _read(self, text: str) -> str | None:
        return answer_in(text, self.answer, self.words)

    def _votes(self, samples) -> dict:
        return by_answer(whole(samples), self._read)

    def _winner(self, votes) -> str:
        return elected(votes, self._weight)

    def _weigh(self, lm: Lane, voters) -> Iterator:
        """Ask the reward for the weight of each text, if votes are weighted by one."""
        if not self.rewarded:
            return
        scores = yield from self.rewards(lm, [sample.rewarded for sample in voters])
        self._weights = {sample.leaf.number: score for sample, score in zip(voters, scores)}
        yield Figure("bars", "reward of each text", {"labels": [s.label for s in voters], "values": scores})
        yield self._shares(self._votes(voters))

    def _weight(self, voters) -> float:
        """What the texts of one answer count together; while rewards are not known, their number."""
        if self._weights is not None:
            return sum(self._weights.get(sample.leaf.number, 0.0) for sample in voters)
        return sum(math.exp(sample.mean) for sample in voters) if self.vote == "weighted" else len(voters)

    def _shares(self, votes) -> Figure:
        return Figure("bars", "answers", {"labels": list(votes), "values": [*map(self._weight, votes.values())]})

    def _outcome(self, samples, votes) -> str:
        if not votes:
            return "No text has an answer: the most probable text is returned."
        winner, voters = self._winner(votes), sum(map(len, votes.values()))
        weights = {"majority": "", "weighted": ", weighted by probability"}.get(self.vote, ", weighted by reward")
        return (
            f"{winner!r} has {len(votes[winner])} of {voters} votes{weights}; no text after #{self._decided(samples)} "
            "changed that."
        )

    def _decided(self, samples) -> int:
        """Number of the text, from 1, after which the winner no longer changed."""
        polls = [self._votes(samples[:count]) for count in range(1, len(samples) + 1)]
        winners = [self._winner(votes) if votes else None for votes in polls]
        return 1 + max((i for i, winner in enumerate(winners, 1) if winner != winners[-1]), default=0)

    def _progress(self, samples, completed) -> Iterator:
        yield Branches(scores={sample.leaf.number: sample.logp for sample in samples})
        if completed:
            yield self._shares(self._votes(samples))
