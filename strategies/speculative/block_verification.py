"""Block verification: a whole chain of draft tokens is verified jointly."""
from dataclasses import dataclass, field

from torch import Tensor

from playground.algorithms.speculative.verification import Ruling, is_over, leftover, match, walk
from playground.contract import Lane, Verifier
from playground.contract.token_tree import ROOT
from playground.engine.sampling import one_hot, residual_distribution
from playground.events import Test, Verdict


@dataclass
class DraftBlock:
    """A chain of draft tokens: nodes of the tree, their tokens, and the target's (p) and the drafter's (q) distribution
    at each, [V].
    """

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    p: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.nodes)


class BlockVerification(Verifier):
    """Verify a whole chain of draft tokens jointly: how far it is accepted depends on the product of the ratios p / q.

    w_i = min(1, w_(i-1) p / q) is the joint weight of the first i tokens. Later tokens can compensate for one with p <
    q, where rejection sampling may stop. On average more tokens are accepted per forward, never fewer, and the output
    distribution is exactly the target's. It helps wherever chains are drafted and tokens are sampled. Only the first
    branch of a tree is verified, so drafters of trees without replacement are refused. Sun et al. 2024, arXiv
    2403.10444.
    """

    name, title, paper, sheet = "block_verification", "Block verification", "2403.10444", "speculative/block"
    guarantee = ("greedy_identical", "distribution_identical")
    exact_for = ("independent", "deterministic")

    def judge(self, lm: Lane, tree, rows):
        if not lm.chain.draws:
            return walk(lm, tree, rows, lambda node, children: match(rows.best(node), children[:1], tree))
        block = first_branch(lm, tree, rows)
        worth = self.worth(block)
        accepted, numbers = self._accepted(lm, rows, tree, block, worth)
        cases = zip(block.nodes, block.tokens, block.p, block.q, numbers)
        verdict = Verdict(kept=block.nodes[:accepted], tests=[
            Test(node, float(p[token]), float(q[token]), u, i < accepted, chance=chance)
            for i, (node, token, p, q, (chance, u)) in enumerate(cases)
            if i <= accepted  # tokens after a rejected one are not tested
        ])
        last = block.nodes[accepted - 1] if accepted else ROOT
        if accepted < len(block):
            rest = self.residual(block, worth, accepted)
            verdict.token, verdict.origin = lm.draw(rest, rows.position(last), "redraw"), "redraw"
            verdict.leftover = leftover(lm, Ruling(None, verdict.token, residual=rest))
        elif not rows.unread(last) and not is_over(lm, tree, rows, last):
            verdict.token, verdict.origin = lm.pick(rows, last).token, "bonus" if len(tree) else "sampled"
        return verdict

    def _accepted(self, lm: Lane, rows, tree, block, worth) -> tuple[int, list[tuple[float | None, float | None]]]:
        """How many tokens are accepted, and the chance and the uniform number of each test. The last success counts, so
        tests start at the end of the block, and those before it are not needed.
        """
        numbers: list[tuple[float | None, float | None]] = [(None, None)] * len(block)
        for i in range(len(block), 0, -1):
            position = rows.position(tree.parents[block.nodes[i - 1]])
            chance = self.chance(block, worth, i)
            success, u = lm.flip(chance, position)
            numbers[i - 1] = chance, u
            if success:
                return i, numbers
        return 0, numbers

    def worth(self, block: DraftBlock) -> list[float]:
        """The joint weights w_0 to w_n."""
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


def first_branch(lm: Lane, tree, rows) -> DraftBlock:
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
