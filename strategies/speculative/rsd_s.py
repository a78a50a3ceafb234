"""Recursive speculative decoding with a stochastic beam."""
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from playground.algorithms.speculative.drafting import distinct, guess_row, new_tree
from playground.algorithms.speculative.without_replacement import Urn
from playground.contract import Drafter, knob
from playground.contract.token_tree import ROOT


@dataclass
class Branch:
    """A path of guesses: its last node, its probability in the drafter's eyes, and the tokens that may follow it."""

    node: int
    mass: float
    q: torch.Tensor
    urn: Urn | None = None  # where the lane draws by chance


class RSDS(Drafter):
    """A draft model guesses whole continuations that are all different, and follows only a beam of them to the next
    level.

    Each level holds the `width` continuations that come first when they are drawn without replacement by the
    probability of the whole path, so likely branches get more children and unlikely ones end early. The paper finds
    them by stochastic beam search, with Gumbel noise that travels down the tree; here each draw says whether the next
    continuation grows on a branch that has a child already or on the next branch of the beam, which has the same law. A
    branch that ends the text gives its place to the others. Without chance it is beam search. RSD-S of Jeon et al.
    2024, arXiv 2402.14160.
    """

    name, title, paper, sheet = "rsd_s", "RSD-S: a stochastic beam", "2402.14160", "speculative/rsd"
    needs, drawn, guarantee = ("draft",), "without_replacement", ("collapses",)

    width: int = knob(3, 1, 16, step=1, help="continuations guessed side by side")
    depth: int = knob(4, 0, 8, step=1, help="tokens guessed one after another; 0 is plain decoding")

    def propose(self, lm, budget) -> Iterator:
        tree, beam, alive = new_tree(lm, self), {ROOT: 1.0}, 1.0
        for _ in range(min(self.depth, budget)):
            rows = yield lm.stream("draft").extend(tree)
            found = [(node, mass, guess_row(lm, tree, rows, node)) for node, mass in beam.items()]
            branches = [
                Branch(node, mass, q, Urn(q) if lm.chain.draws else None) for node, mass, q in found if q is not None
            ]
            if not branches:
                break
            alive -= sum(beam.values()) - sum(branch.mass for branch in branches)
            beam = self._drawn(lm, tree, rows, branches, alive) if lm.chain.draws else self._best(tree, branches)
        return tree

    def _drawn(self, lm, tree, rows, branches, alive) -> dict[int, float]:
        """The next beam, nodes with their masses in the order they were drawn. `alive` is the mass of all that has not
        ended.
        """
        beam, begun, position = {}, 0, rows.position(branches[0].node)
        while len(beam) < self.width:
            weights = self._weights(branches, begun, alive)
            if not any(weights):
                break
            at = lm.draw(torch.tensor(weights, dtype=torch.float64), position, "branch")
            begun, branch = max(begun, at + 1), branches[at]
            token = distinct(lm, branch.urn, branch.node, position)
            node = tree.add(token, branch.node, branch.q)
            beam[node] = branch.mass * float(branch.q[token])
        return beam

    def _weights(self, branches, begun, alive) -> list[float]:
        """Chances of each branch that has a child, and of the first that has none: it stands for all paths that have
        none yet.
        """
        weights = [branch.mass * branch.urn.left for branch in branches[:begun]]
        if begun == len(branches):
            return weights
        rest = sum(branch.mass for branch in branches[begun:])
        return [*weights, max(rest, alive - sum(branch.mass for branch in branches[:begun]))]

    def _best(self, tree, branches) -> dict[int, float]:
        """The most probable continuations of all branches together."""
        offers = [branch.q.topk(min(self.width, len(branch.q))) for branch in branches]
        masses = torch.cat([branch.mass * offer.values for branch, offer in zip(branches, offers)])
        tokens, size = torch.cat([offer.indices for offer in offers]).tolist(), len(offers[0].values)
        top, beam = masses.topk(min(self.width, len(masses))), {}
        for mass, place in zip(top.values.tolist(), top.indices.tolist()):
            branch, token = branches[place // size], tokens[place]
            if mass > 0:
                beam[tree.add(token, branch.node, confidence=float(branch.q[token]))] = mass
        return beam
