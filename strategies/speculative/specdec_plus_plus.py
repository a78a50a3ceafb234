"""SpecDec++: guess on while all guesses will probably stand."""
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from operator import mul

from playground.events import Figure
from playground.parts.drafting import chain_until, new_tree
from playground.strategy import Drafter, knob

BINS = 10  # of the draft's probability, all equally wide
PRIOR = 2.0  # guesses a bin is taken to have seen already, standing as often as the draft said


class Reliability:
    """How often guesses stood, by the probability the draft gave them: at first what it says itself, later what was seen."""

    def __init__(self):
        self.seen, self.stood = [0] * BINS, [0] * BINS

    def chance(self, q: float) -> float:
        """That a guess of probability q stands."""
        place = self._place(q)
        return (PRIOR * q + self.stood[place]) / (PRIOR + self.seen[place])

    def learn(self, q: float, stood: bool) -> None:
        place = self._place(q)
        self.seen[place] += 1
        self.stood[place] += stood

    def figure(self) -> Figure:
        """The bins that have seen a guess."""
        known = [place for place in range(BINS) if self.seen[place]]
        labels = [f"{100 * place // BINS} to {100 * (place + 1) // BINS} % ({self.seen[place]} guesses)" for place in known]
        return Figure("bars", "share of guesses that stood, by the draft's own probability",
                      {"labels": labels, "values": [self.stood[place] / self.seen[place] for place in known]})

    def _place(self, q: float) -> int:
        return min(BINS - 1, int(q * BINS))


class SpecDecPlusPlus(Drafter):
    """A draft model guesses on for as long as all its guesses will probably stand, and asks the target once that gets doubtful.

    The chance that nothing is refused is the product of each guess's own chance; where one minus it exceeds h the chain ends.
    That a constant h is near the best rule is the paper's result. Its chances come from a head trained on the draft's hidden
    states; here stands a proxy without training: the draft's own probability of the guess, corrected by how often such
    guesses stood so far, or as it is. The head sees a guess one pass later, so the last one is sent unjudged: `late`.
    h = 1 is a chain of fixed length, most = 0 plain decoding. Huang et al. 2024, arXiv 2405.19715.
    """

    name, title, paper, sheet = "specdec_plus_plus", "SpecDec++, proxy without a head", "2405.19715", "speculative/specdec-plus-plus"
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)
    reconstruction, sure = True, "medium"

    h: float = knob(0.3, 0.0, 1.0, step=0.05, help="chance of some refusal above which the chain ends; 1: never")
    least: int = knob(2, 1, 4, step=1, help="guesses made in any case")
    most: int = knob(20, 0, 32, step=1, help="guesses at most; 0 is plain decoding")
    estimate: str = knob("corrected", choices=("corrected", "draft"), help="a guess's chance: the draft's own probability, corrected by what stood or not")
    late: bool = knob(True, help="judge a guess only once the next is made, as the paper's head has to")

    def propose(self, lm, budget) -> Iterator:
        tree = yield from chain_until(lm, lm.stream("draft"), new_tree(lm, self), min(self.most, budget), self._doubtful)
        if len(tree):
            yield from self._told(lm, tree)
        return tree

    def observe(self, tree, rows, verdict) -> None:
        for test in verdict.tests:
            self._reliability.learn(tree.confidence[test.node], test.kept)

    @cached_property
    def _reliability(self) -> Reliability:
        return Reliability()

    def _chance(self, q: float) -> float:
        return self._reliability.chance(q) if self.estimate == "corrected" else q

    def survival(self, chances: list[float]) -> list[float]:
        """After each guess, the chance that all so far stand; of the last one nothing is known yet where it is judged late."""
        known = [*chances[:-1], 1.0] if self.late else chances
        return list(accumulate(known, mul))

    def _doubtful(self, tree) -> bool:
        return len(tree) >= self.least and 1 - self.survival(list(map(self._chance, tree.confidence)))[-1] > self.h

    def _told(self, lm, tree) -> Iterator[Figure]:
        """How the chance fell guess by guess, how many guesses that made, and how far the draft's probabilities can be trusted."""
        falls = self.survival(list(map(self._chance, tree.confidence)))
        yield Figure("bars", "chance that all guesses so far stand", {"labels": list(map(lm.piece, tree.tokens)), "values": falls})
        series, lines = {"all stand": falls[-1]}, {"1 - h": 1 - self.h}
        yield Figure("scalar", "predicted chance that all guesses stand", {"x": lm.generated, "series": series, "lines": lines})
        yield Figure("scalar", "length of the chain", {"x": lm.generated, "series": {"guesses": len(tree)}, "lines": {"at most": self.most}})
        if any(self._reliability.seen):
            yield self._reliability.figure()
