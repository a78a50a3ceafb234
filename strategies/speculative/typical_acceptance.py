"""Typical acceptance, Medusa's verification rule."""
import math
from collections.abc import Callable

from torch import Tensor
from torch.special import entr

from playground.algorithms.speculative.verification import Ruling, walk
from playground.contract import Lane, Verifier, knob
from playground.contract.token_tree import ROOT
from playground.events import Test


class TypicalAcceptance(Verifier):
    """Accept every draft token that is probable enough for the target, and follow the longest accepted path.

    The threshold is min(epsilon, delta * exp(-H)), so it is low where the target is uncertain; the drafter's
    probabilities are not used. Useful where a plausible text suffices: at higher temperatures far more draft tokens are
    accepted than by rejection sampling. The text does not follow the target's distribution but is biased towards the
    drafter's proposals. Under greedy decoding it is exact. A large epsilon and a large delta accept almost nothing. Cai
    et al. 2024, arXiv 2401.10774, with a sampled token after the accepted ones.
    """

    name, title, paper, sheet = "typical_acceptance", "Typical acceptance", "2401.10774", "speculative/medusa"
    guarantee = ("greedy_identical",)
    exact_for = ("independent", "without_replacement", "deterministic")

    epsilon: float = knob(0.09, 0.01, 0.99, step=0.01, help="probability above which any draft token is accepted")
    delta: float = knob(0.3, 0.0, 0.99, step=0.01, help="factor of exp(-entropy) in the threshold; 0 accepts all")

    def judge(self, lm: Lane, tree, rows):
        accepted: dict[int, bool] = {}

        def passes(child: int) -> bool:
            if child not in accepted:
                p = rows.distribution(tree.parents[child])
                accepted[child] = float(p[tree.tokens[child]]) > self.threshold(p)
            return accepted[child]

        def rule(node, children):
            p, open_to = rows.distribution(node), [*dict.fromkeys(children)]
            best = max(filter(passes, open_to), default=None, key=lambda child: self._rank(tree, rows, child, passes))
            tests = [Test(c, float(p[tree.tokens[c]]), tree.confidence[c], None, passes(c)) for c in open_to]
            return Ruling(best, lm.pick(rows, node).token if best is None else -1, tests, p if best is None else None)

        return walk(lm, tree, rows, rule)

    def threshold(self, p: Tensor) -> float:
        """The probability that a draft token must exceed, given the target's distribution p [V]."""
        return min(self.epsilon, self.delta * math.exp(-float(entr(p).sum())))

    def _rank(self, tree, rows, child: int, passes: Callable[[int], bool]) -> tuple[int, float]:
        """Length of the longest accepted path from a child on, and its own probability."""
        probability = float(rows.distribution(tree.parents[child])[tree.tokens[child]])
        return self._longest(tree, rows, child, passes), probability

    def _longest(self, tree, rows, node: int, passes: Callable[[int], bool]) -> int:
        if node != ROOT and rows.unread(node):
            return 1
        onward = [child for child in dict.fromkeys(tree.children(node)) if passes(child)]
        return 1 + max((self._longest(tree, rows, child, passes) for child in onward), default=0)
