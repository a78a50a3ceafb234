"""Searches under a constraint rank texts by the model's own probabilities: the mask removes tokens without
changing the others.
"""
from __future__ import annotations

import math

import pytest
import torch
from tables import TableModel

from playground.algorithms.search import beams
from support.option_searches import LETTERS, OPTIONS, START, answer, chance, lopsided


@pytest.mark.oracle("beam_search", "diverse_beam_search")
@pytest.mark.parametrize("name, knobs", [("beam_search", {}), ("diverse_beam_search", {"groups": 1})])
@pytest.mark.parametrize("seed", range(4))
def test_with_a_beam_per_option_it_finds_the_most_probable_one_like_static(name, knobs, seed):
    model, options = lopsided(seed), "|".join(OPTIONS)
    best = max(OPTIONS, key=lambda option: chance(model, option))
    found = answer(name, ("choice", {"options": options}), model, [START], beams=8, length_exponent=0.0, **knobs)
    assert found.text == best == answer("static", (), model, [START], items=options, beams=8).text
    assert found.reason == "end" and set(found.origins) == {"sampled"}


def test_a_rollout_of_adadec_under_a_grammar_is_scored_among_all_tokens():
    """"c" leads to tokens the model would write, "a" to a forced one that it would not."""
    a, b, c, d = LETTERS.convert_tokens_to_ids(list("abcd"))

    def scores(context: tuple[int, ...]) -> torch.Tensor:
        row = torch.full((len(LETTERS),), -30.0, dtype=torch.float64)
        if context[-1] == START:
            row[[a, c]] = torch.tensor([0.55, 0.45], dtype=torch.float64).log()
        else:
            row[d] = 0.0
        return row

    model = TableModel(tokenizer=LETTERS, rule=scores)
    constraint = ("choice", {"options": "ab|cd"})
    assert answer("greedy", constraint, model, [START]).text == "ab"
    assert answer("adadec", constraint, model, [START], tau=0.0, width=2, depth=1).text == "cd"


def test_log_probabilities_of_beams_are_the_models_own():
    model = lopsided(0)
    seen = []
    inner = beams.log_probabilities

    def watched(rows):
        seen.append((inner(rows), torch.cat([row.raw for row in rows]).log_softmax(-1)))
        return seen[-1][0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("strategies.search.beam_search.log_probabilities", watched)
        answer("beam_search", ("choice", {"options": "|".join(OPTIONS)}), model, [START])
    for found, own in seen:
        legal = found > -math.inf
        assert legal.any() and not legal.all() and torch.equal(found[legal], own[legal])
