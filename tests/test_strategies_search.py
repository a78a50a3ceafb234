"""Searches over several texts: beams, selection among samples, and superposed drafts, against brute force."""
from __future__ import annotations

import math

import torch
from registry import Collapse
from tables import TableModel

from playground.algorithms.search.beams import Offer, best, distinct, shared_start
from support.search_runs import of, run
from support.searches import found
from support.speculation import GREEDY, MODEL

COLLAPSES = {
    "best_of_n": [
        Collapse(of("best_of_n", n=1, temperature=1.0), MODEL),
        Collapse(of("best_of_n", temperature=0.0), GREEDY),
    ],
    "self_consistency": [
        Collapse(of("self_consistency", n=1, temperature=1.0), MODEL),
        Collapse(of("self_consistency", temperature=0.0, answer="text"), GREEDY),
    ],
    "superposed": [Collapse(of("superposed", drafts=1, alpha=0.0, temperature=t), GREEDY) for t in (0.06, 1.0)],
}


def test_the_first_group_is_a_beam_search_of_its_own_width():
    for seed in range(5):
        model = TableModel("abcde", "e", seed)
        plain = run(of("beam_search", beams=3, length_exponent=0.0), model, [0, 1], 7).finished()
        assert [text for text, _ in found(model, [0, 1], 7, 6, 2)[0]] == [text for text, _ in plain]


def test_tied_candidates_are_ordered_by_beam_and_id():
    sums = torch.tensor([[0.0, 2.0, 1.0], [1.0, 2.0, -math.inf]])
    assert best(sums, 4) == [Offer(0, 1, 2.0), Offer(1, 1, 2.0), Offer(0, 2, 1.0), Offer(1, 0, 1.0)]
    assert len(best(sums, 9)) == 5


def test_diversity_counts_distinct_ngrams():
    assert distinct([[1, 2, 1], [1, 2, 3]], 1) == 3 / 6 and distinct([[1, 2, 1], [1, 2, 3]], 2) == 3 / 4
    assert shared_start([[1, 2, 1], [1, 2, 3]]) == 2 and shared_start([[1], [2]]) == 0
