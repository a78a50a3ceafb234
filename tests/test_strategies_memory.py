"""Draft tokens from earlier rows: STAND and ADED."""
from __future__ import annotations

import pytest
import torch
from tables import TableModel, write

from playground.contract import find, make
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from support.speculation import collapses, speculative_lane

COLLAPSES = {"aded": [*collapses("aded", nodes=0), *collapses("aded", gain=0, prompt=False)]}
aded = __import__(find("aded").__module__, fromlist=["TriGrams"])


def table(known: dict) -> object:
    made = aded.TriGrams()
    made.known = known
    return made


def searching(known: dict, **knobs):
    drafter = make("aded", **knobs)
    drafter._table = table(known)
    return drafter


def test_a_tri_gram_gains_weight_with_every_use_up_to_the_cap():
    grams = table({})
    grams.reinforce([1, 2, 3, 4], 0.04, 3.0)
    assert grams.known == {(1, 2): {3: 0.04}, (2, 3): {4: 0.04}}
    for _ in range(99):
        grams.reinforce([1, 2, 3, 4], 0.04, 3.0)
    assert grams.known == {(1, 2): {3: 3.0}, (2, 3): {4: 3.0}}


def test_a_prompt_is_counted_as_shares_and_known_weights_stay():
    grams = table({(1, 2): {9: 0.5}})
    grams.read([1, 2, 3, 1, 2, 3, 1, 2, 4], 2)
    assert grams.known[1, 2] == pytest.approx({3: 2 / 3, 4: 1 / 3, 9: 0.5}) and grams.known[2, 3] == {1: 1.0}


def test_visit_counts_of_a_search_equal_a_worked_example():
    root = searching({(1, 2): {3: 0.9, 4: 0.1}}).search((1, 2))
    assert (root.visits, [child.visits for child in root.children]) == (150, [139, 11])


def test_a_rollout_below_the_tree_has_the_expected_value():
    known = {(0, 1): {1: 0.5, 2: 1.5}, (1, 1): {0: 1.0}, (1, 2): {1: 0.2, 2: 0.6}}
    expected = 0.25 * (0.5 + 1.0) + 0.75 * (1.5 + 0.25 * 0.2 + 0.75 * 0.6)
    assert searching(known)._expected_weight((0, 1), 2, {}) == pytest.approx(expected)


def test_scores_change_the_result_of_a_search():
    known = {(0, 1): {2: 1.0, 3: 1.0}, (1, 2): {4: 0.01}, (1, 3): {4: 3.0}}
    visits = [
        [child.visits for child in searching(known, score=score, c1=1.0).search((0, 1)).children]
        for score in ("weights", "one")
    ]
    assert visits[0][1] > 1.5 * visits[0][0] and visits[1][0] == visits[1][1]


def test_drafted_paths_are_one_token_longer_than_searched():
    ring = {(a, (a + 1) % 9): {(a + 2) % 9: 1.0} for a in range(9)}
    drafter = searching(ring)
    assert max(drafter.most_visited(drafter.search((0, 1))), key=len) == [2, 3, 4, 5]


def test_drafts_fit_the_node_limit_with_the_longest_paths_first():
    drafter = make("aded", nodes=8)
    assert drafter._fitting([[1, 2, 3], [1], [1, 2, 3, 4], [4, 5], [1]]) == [[1, 2, 3], [1], [4, 5]]


def test_a_cyclic_text_takes_one_forward_per_five_tokens_once_learnt():
    size = 9
    ring = TableModel(
        "abcdefghi", rule=lambda context: torch.eye(size, dtype=torch.float64)[(context[-1] + 1) % size] * 50
    )
    write(
        assemble(speculative_lane("aded", "greedy_match")),
        {"target": ring},
        [*range(9), 0, 1],
        Limits(0, 40),
        Draws(0),
    )
    assert ring.forwards == 1 + 40 / 5


class Swallows(find("aded")):
    """Rejected draft tokens gain weight as if they had been committed."""

    def observe(self, tree, rows, verdict):
        for node in range(len(tree)):
            self._table.reinforce([*rows.committed[-2:], *tree.prefix(node)], self.gain, self.cap)


@pytest.mark.parametrize("cls, right", [(find("aded"), True), (Swallows, False)], ids=["kept", "refused too"])
def test_the_table_gains_only_what_was_written(cls, right):
    assembly = assemble(speculative_lane("aded", "greedy_match"))
    assembly.decoder.drafter = cls(prompt=False, gain=0.5)
    model = TableModel("abc", seed=3)
    lane = write(assembly, {"target": model}, [0, 1, 0, 2, 0, 1], Limits(0, 30), Draws(0))
    text = lane.tokens
    written = {tuple(text[i:i + 3]) for i in range(len(text) - 2)}
    grams = next(iter(lane._recalled.values())).known
    heaviest = max(weight for known in grams.values() for weight in known.values())
    assert (
        {(*pair_, token) for pair_, known in grams.items() for token in known} == written and heaviest <= 3.0
    ) == right
