"""Block verification: a whole chain of draft tokens is tested at once."""
from dataclasses import dataclass, field

from torch import Tensor

from playground.algorithms.speculative.verification import is_over
from playground.contract import Verifier
from playground.contract.token_tree import ROOT
from playground.engine.sampling import one_hot, residual_distribution
from playground.events import Test, Verdict


@dataclass
class DraftBlock:
    """A chain of draft tokens: nodes of the tree, their tokens, and target and drafter in the place of each, [V]."""

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    p: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.nodes)


class BlockVerification(Verifier):
    """Decide about a whole chain of draft tokens together: how far it is accepted depends on the product of the ratios.

    w_i = min(1, w_(i-1) p / q) is what the first i tokens are worth together. A token that the target likes less than
    the drafter may be made up for by those after it, where rejection sampling would stop. On average more tokens are
    accepted per forward, never fewer, and the output distribution is exactly the target's. It helps wherever chains are
    drafted and tokens are sampled. Of a tree only the first branch is verified, so drafters of trees without
    replacement are refused. Sun et al. 2024, arXiv 2403.10444.
    """

    name, title, paper, sheet = "block_verification", "Block verification", "2403.10444", "speculative/block"
    guarantee = ("greedy_identical", "distribution_identical")
    exact_for = ("independent", "deterministic")

    def judge(self, lm, tree, rows):
        block = first_branch(lm, tree, rows)
        worth = self.worth(block)
        accepted, numbers = self._accepted(lm, rows, tree, block, worth)
        cases = zip(block.nodes, block.tokens, block.p, block.q, numbers)
        verdict = Verdict(kept=block.nodes[:accepted], tests=[
            Test(node, float(p[token]), float(q[token]), u, i < accepted)
            for i, (node, token, p, q, u) in enumerate(cases)
            if i <= accepted  # what follows a rejected token was not up for acceptance
        ])
        last = block.nodes[accepted - 1] if accepted else ROOT
        if accepted < len(block):
            rest = self.residual(block, worth, accepted)
            verdict.token, verdict.origin = lm.draw(rest, rows.position(last), "redraw"), "redraw"
        elif not rows.unread(last) and not is_over(lm, tree, rows, last):
            verdict.token, verdict.origin = lm.pick(rows, last).token, "bonus" if len(tree) else "sampled"
        return verdict

    def _accepted(self, lm, rows, tree, block, worth) -> tuple[int, list[float | None]]:
        """How many tokens are accepted, and the uniform number of each test. The last success counts, so tests are made
        from the end of the block.
        """
        numbers: list[float | None] = [None] * len(block)
        for i in range(len(block), 0, -1):
            position = rows.position(tree.parents[block.nodes[i - 1]])
            success, numbers[i - 1] = lm.flip(self.chance(block, worth, i), position)
            if success:
                return i, numbers
        return 0, numbers

    def worth(self, block: DraftBlock) -> list[float]:
        """w_0 to w_n."""
        found = [1.0]
        for token, p, q in zip(block.tokens, block.p, block.q):
            found.append(min(1.0, found[-1] * float(p[token]) / float(q[token])))
        return found

    def chance(self, block: DraftBlock, worth: list[float], i: int) -> float:
        """Probability that exactly the first i tokens are accepted if not more are."""
        if i == len(block):
            return worth[i]
        left = float((worth[i] * block.p[i] - block.q[i]).clamp(min=0).sum())
        return left / (left + 1 - worth[i]) if left + 1 - worth[i] > 0 else 1.0

    def residual(self, block: DraftBlock, worth: list[float], i: int) -> Tensor:
        """The distribution of the token that follows the first i if not more are accepted, [V]."""
        return residual_distribution(worth[i] * block.p[i], block.q[i])


def first_branch(lm, tree, rows) -> DraftBlock:
    """The first child of each node from the root down, as far as the target has read the tree."""
    block, node = DraftBlock(), ROOT
    while not rows.unread(node) and not is_over(lm, tree, rows, node) and (children := tree.children(node)):
        p, node = rows.distribution(node), children[0]
        q = tree.q[node] if tree.q[node] is not None else one_hot(tree.tokens[node], p)
        block.nodes.append(node)
        block.tokens.append(tree.tokens[node])
        block.p.append(p)
        block.q.append(q)
    return block
