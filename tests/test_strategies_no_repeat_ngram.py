"""No repeated n-gram against the library or by hand, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from tables import TableModel
from transformers import NoRepeatNGramLogitsProcessor

from playground.contract import Sampler, find
from playground.contract.lane_config import LaneConfig
from support.penalties import alone, apply, ngrams, notes, run, spans, texts
from support.repeating_texts import applied, repeating, scores_for
from support.wrong_variants import refused

NoRepeatNgram = find("no_repeat_ngram")


def check_no_repeat_ngram(cls: type[Sampler]) -> None:
    for n in (1, 2, 3, 4):
        for number, text in enumerate(repeating(letters=4)):  # two letters are always left
            scores = scores_for(number)
            library = NoRepeatNGramLogitsProcessor(n)(torch.tensor([text]), scores[None])[0]
            assert applied(cls, text, scores, len(text) // 2, n=n) == library.tolist()
    assert applied(cls, [0, 0, 0], scores_for(0), n=0) == scores_for(0).tolist()


class OneTokenLonger(NoRepeatNgram):
    def banned(self, history):
        self.n += 1
        try:
            return super().banned(history)
        finally:
            self.n -= 1


class ForgetsThePrompt(NoRepeatNgram):
    def banned(self, history):
        return super().banned(history[self.start :])


class OnlyTheLastPlace(NoRepeatNgram):
    """Removes only the continuation of the last occurrence of the n-gram's prefix."""

    def banned(self, history):
        found = super().banned(history)
        last = max(found, key=lambda token: len(history) - history[::-1].index(token), default=None)
        return {last: found[last]} if found else {}


@pytest.mark.oracle("no_repeat_ngram")
def test_no_repeat_ngram_removes_what_the_library_removes():
    check_no_repeat_ngram(NoRepeatNgram)


@pytest.mark.refuses("no_repeat_ngram")
@pytest.mark.parametrize("wrong", [OneTokenLonger, ForgetsThePrompt, OnlyTheLastPlace])
def test_a_wrong_no_repeat_ngram_is_refused(wrong):
    refused(check_no_repeat_ngram, wrong)


GREEDY = LaneConfig("greedy")
COLLAPSES = {"no_repeat_ngram": [Collapse(alone("no_repeat_ngram", n=0), GREEDY)]}


# --- forbidden n-grams ---

@pytest.mark.oracle("no_repeat_ngram")
@pytest.mark.parametrize("n", range(1, 9))
def test_rows_of_no_repeat_ngram_equal_the_librarys(n):
    processor = NoRepeatNGramLogitsProcessor(n)
    for text in texts(150, letters=3 if n > 2 else 30, longest=30):
        if text:
            scores = torch.arange(40, dtype=torch.float32)
            assert torch.equal(
                apply("no_repeat_ngram", scores, text, n=n), processor(torch.tensor([text]), scores[None])[0]
            )


def test_worked_example_the_token_that_completes_the_trigram_is_removed():
    found = apply("no_repeat_ngram", torch.zeros(5), [0, 1, 2, 3, 0, 1, 2], n=3)
    assert found.tolist() == [0, 0, 0, -math.inf, 0]


def test_if_all_tokens_would_be_removed_the_row_is_unchanged():
    scores = torch.tensor([1.0, 2.0, -math.inf])
    assert torch.equal(apply("no_repeat_ngram", scores, [0, 1], n=1), scores)
    assert apply("no_repeat_ngram", scores, [1, 1], n=1).tolist() == [1.0, -math.inf, -math.inf]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_no_ngram_occurs_twice_while_there_is_an_alternative(n):
    model = TableModel("abcdefghijklmnopqrstuvwx", rule=lambda context: torch.arange(24, 0, -1, dtype=torch.float64))
    written, events = run(alone("no_repeat_ngram", n=n), model, [0, 1, 0], 40)
    text = [0, 1, 0, *written]
    assert len(ngrams(text, n)) == len(text) - n + 1 and len(set(written)) > 1
    assert notes(events) and spans(events, "forbidden repeats")[0][2] == "a" * n


# --- wrong variants ---

def test_another_ngram_length_removes_other_tokens():
    text = [0, 1, 2, 3, 4, 1, 2, 0, 2, 0, 1, 2]
    banned = [
        set((apply("no_repeat_ngram", torch.zeros(6), text, n=n) == -math.inf).nonzero().flatten().tolist())
        for n in range(1, 6)
    ]
    assert banned == [{0, 1, 2, 3, 4}, {0, 3}, {0, 3}, {3}, set()]
