"""Recursive speculative decoding with a stochastic beam."""
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from playground.algorithms.speculative.drafting import distinct, level_distributions, new_tree
from playground.algorithms.speculative.without_replacement import RemainingTokens
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import ROOT
from playground.engine.host_copies import read_lists
from playground.engine.sampling import largest


@dataclass
class Branch:
    """A path of the beam: its last node, its probability under the draft, and the distribution of its next token."""

    node: int
    mass: float
    q: torch.Tensor
    remaining: RemainingTokens | None = None  # if the lane samples


class RSDS(Drafter):
    """A draft model drafts distinct sequences and extends only a beam of them at each level.

    Each level holds `width` sequences sampled without replacement by the probability of the whole path, so probable
    branches get more children and improbable ones end early. The paper uses stochastic beam search, with Gumbel noise
    propagated down the tree. Here each draw decides whether the next sequence extends a branch that already has a child
    or the next branch of the beam, which has the same distribution. A branch with an end token frees its place in the
    beam. Under greedy decoding this is beam search. RSD-S of Jeon et al. 2024, arXiv 2402.14160.
    """

    name, title, paper, sheet = "rsd_s", "RSD-S: a stochastic beam", "2402.14160", "speculative/rsd"
    needs, drawn, guarantee = ("draft",), "without_replacement", ("collapses",)

    width: int = knob(3, 1, 16, step=1, help="draft sequences, the beam width")
    depth: int = knob(4, 0, 8, step=1, help="draft tokens in each; 0 is plain decoding")

    def propose(self, lm: Lane, budget) -> Iterator:
        tree, beam, live = new_tree(lm, self), {ROOT: 1.0}, 1.0
        for _ in range(min(self.depth, budget)):
            rows = yield lm.stream("draft").extend(tree)
            leaves, q = level_distributions(lm, tree, rows, list(beam))
            on_host = q.cpu() if lm.chain.draws else q
            branches = [
                Branch(leaf, beam[leaf], own, RemainingTokens(own, copy) if lm.chain.draws else None)
                for leaf, own, copy in zip(leaves, q, on_host)
            ]
            if not branches:
                break
            live -= sum(beam.values()) - sum(branch.mass for branch in branches)
            beam = self._sampled(lm, tree, rows, branches, live) if lm.chain.draws else self._best(tree, branches)
        return tree

    def _sampled(self, lm: Lane, tree, rows, branches, live) -> dict[int, float]:
        """Sample the next beam: nodes with their masses, in the order drawn. `live` is the mass of unfinished paths."""
        beam, started, position = {}, 0, rows.position(branches[0].node)
        while len(beam) < self.width:
            weights = self._weights(branches, started, live)
            if not any(weights):
                break
            at = lm.draw(torch.tensor(weights, dtype=torch.float64), position, "branch")
            started, branch = max(started, at + 1), branches[at]
            token = distinct(lm, branch.remaining, branch.node, position)
            share = branch.remaining.share(token)
            beam[tree.add(token, branch.node, branch.q, share)] = branch.mass * share
        return beam

    def _weights(self, branches, started, live) -> list[float]:
        """Remaining mass of each branch that has a child, and of the first without one, which represents all others."""
        weights = [branch.mass * branch.remaining.left for branch in branches[:started]]
        if started == len(branches):
            return weights
        rest = sum(branch.mass for branch in branches[started:])
        return [*weights, max(rest, live - sum(branch.mass for branch in branches[:started]))]

    def _best(self, tree, branches) -> dict[int, float]:
        """The most probable continuations over all branches."""
        tops = [largest(branch.q, min(self.width, len(branch.q))) for branch in branches]
        masses = torch.cat([branch.mass * top.values for branch, top in zip(branches, tops)])
        best, beam, size = largest(masses, min(self.width, len(masses))), {}, len(tops[0].values)
        chances, tokens, *ranked = read_lists(torch.cat([top.values for top in tops]),
                                              torch.cat([top.indices for top in tops]), *best)
        for mass, index in zip(*ranked):
            if mass > 0:
                beam[tree.add(tokens[index], branches[index // size].node, confidence=chances[index])] = mass
        return beam
