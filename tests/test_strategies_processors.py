"""Logit bias, forbidden words, a minimum length and texts without an end, against the library's processors."""
from __future__ import annotations

import pytest
import torch
from runs import alone, written
from tables import TableModel

from playground.algorithms.sampling.phrases import spellings
from playground.contract import make
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from support.processed_rows import END, REMOVED, V, begun

GREEDY = LaneConfig("greedy")


# --- logit bias and forbidden words ---

def test_a_phrase_is_spelled_at_the_start_of_a_line_and_after_a_space():
    class Speller:
        def spell(self, text):
            return [ord(letter) for letter in text]

        def can_spell(self, text):
            return text.isascii()

        def special(self, token):
            return chr(token) == "$"

    assert spellings(Speller(), "ab", "words") == [(97, 98), (32, 97, 98)]
    assert spellings(Speller(), "$", "words") == [(ord("$"),)]
    with pytest.raises(Refusal, match="no tokens for 'é'"):
        spellings(Speller(), "é", "words")


def test_a_run_writes_what_the_bias_favours_and_nothing_that_is_forbidden():
    model = {"target": TableModel("abcd", seed=3)}
    plain = written(GREEDY, model, [0, 1], 12)
    assert 3 in written(alone("logit_bias", biases="d: 20"), model, [0, 1], 12)
    assert set(plain) & {0, 2} and not set(written(alone("bad_words", words="a\nc"), model, [0, 1], 12)) & {0, 2}


# --- length ---

def test_an_end_that_is_all_that_is_left_stays():
    row = torch.full((1, V), REMOVED).index_fill(1, torch.tensor([END]), 1.0)
    for sampler in (make("ignore_end"), make("min_new_tokens")):
        assert torch.equal(begun(sampler).apply(row, [[0]]), row)


def test_runs_last_as_long_as_they_must():
    """The model ends at once."""
    model = {"target": TableModel("ab.", ends=".", rule=lambda text: torch.tensor([0.0, 1.0, 5.0]).double())}
    lengths = [len(written(lane, model, [0, 1], 9)) for lane in
               (GREEDY, alone("min_new_tokens", count=4), alone("ignore_end"))]
    assert lengths == [1, 5, 9]
