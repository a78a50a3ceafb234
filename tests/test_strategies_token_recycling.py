"""Token recycling: its tree against one by hand, and wrong variants against the same check."""
from __future__ import annotations

from itertools import product

import pytest
from tables import TableModel, write

from playground.contract import Drafter, find, make
from playground.contract.token_tree import ROOT
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from support.speculation_oracles import NAMES, Recording, assert_refused, speculation

# the seven likeliest paths of the paper's tree, as ranks among the successors
RANKS = [ranks for depth in range(1, 4) for ranks in product(range(3), repeat=depth) if sum(ranks) + depth <= 3]


def recycled_paths(known: dict[int, list[int]], token: int) -> set[tuple[int, ...]]:
    """Paths of tokens along RANKS after a token."""
    found = set()
    for ranks in RANKS:
        path: list[int] = []
        for rank in ranks:
            followers = known.get(path[-1] if path else token, [])
            if rank >= len(followers):
                break
            path.append(followers[rank])
        else:
            found.add(tuple(path))
    return found


def check_token_recycling(drafter: type[Drafter]) -> None:
    model, seen, known = TableModel("abcdefgh", seed=5, spread=3), Recording(make("greedy_match")), {}
    write(speculation(drafter(nodes=len(RANKS), k=3), seen), {"target": model}, [0, 1], Limits(0, 60), Draws(0))
    for text, tree, _ in seen.rounds[:-4]:  # the last trees are cut off at the length of the text
        assert {tuple(tree.prefix(node)) for node in range(len(tree))} == recycled_paths(known, text[-1])
        for node in range(ROOT, len(tree)):
            path = tree.prefix(node)
            scores = model.scores((*text, *path)).tolist()
            known[path[-1] if path else text[-1]] = sorted(range(8), key=lambda token: -scores[token])[:3]
    assert len(known) > 5


class KeepsTheFirstSuccessors(find("token_recycling")):
    """Never replaces what was learned once."""

    def observe(self, tree, rows, verdict):
        before = dict(self._memory.known)
        super().observe(tree, rows, verdict)
        self._memory.known.update(before)


class LearnsFromAcceptedTokens(find("token_recycling")):
    def observe(self, tree, rows, verdict):
        nodes = [ROOT, *verdict.kept]
        tokens = [rows.committed[-1], *(tree.tokens[node] for node in verdict.kept)]
        self._memory.learn(tokens, rows.raw[[node + 1 for node in nodes]], self.k)


class LearnsARowLate(find("token_recycling")):
    """Takes the row before a token for the row after it."""

    def observe(self, tree, rows, verdict):
        self._memory.learn([rows.committed[-1], *tree.tokens], rows.raw.roll(1, 0), self.k)


@pytest.mark.oracle("token_recycling")
def test_recycled_trees_equal_those_of_a_matrix_updated_by_hand():
    check_token_recycling(find("token_recycling"))


@pytest.mark.refuses("token_recycling")
@pytest.mark.parametrize("wrong", [KeepsTheFirstSuccessors, LearnsFromAcceptedTokens, LearnsARowLate], ids=NAMES)
def test_a_wrong_adjacency_matrix_is_detected(wrong):
    assert_refused(check_token_recycling, wrong)
