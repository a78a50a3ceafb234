"""Forbidden words against the library or its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from runs import alone
from tables import TableModel, prepared
from transformers import NoBadWordsLogitsProcessor

from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from support.processed_rows import END, REMOVED, by_the_library, everywhere, histories, rows, with_phrases
from support.wrong_variants import refused

GREEDY = LaneConfig("greedy")
COLLAPSES = {"bad_words": [Collapse(alone("bad_words"), GREEDY)]}
WORDS = [(1,), (0, 2), (3, 3, 4)]


def check_bad_words(cls: type[Sampler]) -> None:
    library = NoBadWordsLogitsProcessor([list(word) for word in WORDS], eos_token_id=END)
    found = with_phrases(cls(), dict.fromkeys(WORDS, REMOVED)).apply(rows(), histories())
    assert torch.equal(found, by_the_library(lambda history: library))


class ForbidsLastTokensEverywhere(find("bad_words")):
    def apply(self, scores, histories):
        return everywhere(scores, self._phrases)


class ForbidsSingleTokensAlone(find("bad_words")):
    def apply(self, scores, histories):
        return everywhere(scores, {word: value for word, value in self._phrases.items() if len(word) == 1})


@pytest.mark.oracle("bad_words")
def test_what_is_forbidden_is_what_the_library_forbids():
    check_bad_words(find("bad_words"))


@pytest.mark.refuses("bad_words")
@pytest.mark.parametrize("wrong", [ForbidsLastTokensEverywhere, ForbidsSingleTokensAlone])
def test_wrong_forbidden_words_are_refused(wrong):
    refused(check_bad_words, wrong)


def test_a_row_that_would_be_empty_is_left_alone():
    sampler, *_ = prepared([make("bad_words", words="a\nb\nc")], {"target": TableModel("abc")}, [0])
    row = torch.tensor([[1.0, 2.0, REMOVED]])
    assert torch.equal(sampler.apply(row, [[0]]), row)
