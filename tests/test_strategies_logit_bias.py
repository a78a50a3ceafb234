"""Logit bias against the library or its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from runs import alone
from transformers import SequenceBiasLogitsProcessor

from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from support.processed_rows import by_the_library, everywhere, histories, rows, with_phrases
from support.wrong_variants import refused

GREEDY = LaneConfig("greedy")
COLLAPSES = {
    "logit_bias": [Collapse(alone("logit_bias"), GREEDY), Collapse(alone("logit_bias", biases="a: 0"), GREEDY)],
}
BIASES = {(1,): 2.5, (0, 2): -3.0, (3, 3, 4): 4.0}


def check_logit_bias(cls: type[Sampler]) -> None:
    library = SequenceBiasLogitsProcessor([[list(phrase), bias] for phrase, bias in BIASES.items()])
    found = with_phrases(cls(), BIASES).apply(rows(), histories())
    assert torch.allclose(found, by_the_library(lambda history: library))


class BiasesLastTokensEverywhere(find("logit_bias")):
    def apply(self, scores, histories):
        return everywhere(scores, self._phrases)


class BiasesFirstTokens(find("logit_bias")):
    def apply(self, scores, histories):
        return everywhere(scores, {phrase[:1]: bias for phrase, bias in self._phrases.items()})


@pytest.mark.oracle("logit_bias")
def test_a_bias_is_added_where_the_library_adds_it():
    check_logit_bias(find("logit_bias"))


@pytest.mark.refuses("logit_bias")
@pytest.mark.parametrize("wrong", [BiasesLastTokensEverywhere, BiasesFirstTokens])
def test_a_wrong_bias_is_refused(wrong):
    refused(check_logit_bias, wrong)


@pytest.mark.parametrize("biases", ["dog", "dog: much", ": 3", "dog: 1e9", "dog: nan"])
def test_a_line_that_is_no_bias_is_refused(biases):
    with pytest.raises(Refusal, match="not a bias"):
        make("logit_bias", biases=biases)


def test_a_phrase_may_contain_a_colon_and_a_bias_may_exclude():
    assert make("logit_bias", biases="a: b: -inf\n\n c :2").biases
