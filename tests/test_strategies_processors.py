"""Logit bias, forbidden words, a minimum length and texts without an end, against the library's processors."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from registry import Collapse
from runs import alone, written
from tables import TableModel, prepared
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from playground.algorithms.sampling.phrases import spellings
from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal

GREEDY = LaneConfig("greedy")
COLLAPSES = {
    "logit_bias": [Collapse(alone("logit_bias"), GREEDY), Collapse(alone("logit_bias", biases="a: 0"), GREEDY)],
    "bad_words": [Collapse(alone("bad_words"), GREEDY)],
    "min_new_tokens": [Collapse(alone("min_new_tokens", count=0), GREEDY)],
}
REMOVED = -math.inf
V, END = 6, 5
BIASES = {(1,): 2.5, (0, 2): -3.0, (3, 3, 4): 4.0}
WORDS = [(1,), (0, 2), (3, 3, 4)]


def histories() -> list[list[int]]:
    """Random texts, and those that end in all but the last token of a phrase."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(V, (n,), generator=generator).tolist() for n in (1, 2, 3, 5, 8, 8)]
    return [*drawn, [2, 0], [3, 3], [4, 3, 3], [0]]


def rows() -> Tensor:
    scores = torch.randn(len(histories()), V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores[::3, 4] = REMOVED
    return scores


def begun(sampler: Sampler, start: int = 1) -> Sampler:
    sampler.begin(start, str, frozenset([END]))
    return sampler


def by_the_library(processor: Callable[[list[int]], Callable]) -> Tensor:
    """Each row after the library's processor; processor(history) makes it."""
    return torch.cat([processor(history)(torch.tensor([history]), row[None])
                      for row, history in zip(rows(), histories())])


def refused(check: Callable, wrong: type[Sampler]) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


# --- logit bias and forbidden words ---


def with_phrases(sampler: Sampler, phrases: dict) -> Sampler:
    sampler._phrases = phrases
    return begun(sampler)


def check_logit_bias(cls: type[Sampler]) -> None:
    library = SequenceBiasLogitsProcessor([[list(phrase), bias] for phrase, bias in BIASES.items()])
    found = with_phrases(cls(), BIASES).apply(rows(), histories())
    assert torch.allclose(found, by_the_library(lambda history: library))


def check_bad_words(cls: type[Sampler]) -> None:
    library = NoBadWordsLogitsProcessor([list(word) for word in WORDS], eos_token_id=END)
    found = with_phrases(cls(), dict.fromkeys(WORDS, REMOVED)).apply(rows(), histories())
    assert torch.equal(found, by_the_library(lambda history: library))


def everywhere(scores: Tensor, phrases: dict) -> Tensor:
    """Wrong: the last token of a phrase counts wherever the text ends."""
    changed = scores.clone()
    for phrase, value in phrases.items():
        changed[:, phrase[-1]] += value
    return changed


class BiasesLastTokensEverywhere(find("logit_bias")):
    def apply(self, scores, histories):
        return everywhere(scores, self._phrases)


class BiasesFirstTokens(find("logit_bias")):
    def apply(self, scores, histories):
        return everywhere(scores, {phrase[:1]: bias for phrase, bias in self._phrases.items()})


class ForbidsLastTokensEverywhere(find("bad_words")):
    def apply(self, scores, histories):
        return everywhere(scores, self._phrases)


class ForbidsSingleTokensAlone(find("bad_words")):
    def apply(self, scores, histories):
        return everywhere(scores, {word: value for word, value in self._phrases.items() if len(word) == 1})


@pytest.mark.oracle("logit_bias")
def test_a_bias_is_added_where_the_library_adds_it():
    check_logit_bias(find("logit_bias"))


@pytest.mark.oracle("bad_words")
def test_what_is_forbidden_is_what_the_library_forbids():
    check_bad_words(find("bad_words"))


@pytest.mark.refuses("logit_bias")
@pytest.mark.parametrize("wrong", [BiasesLastTokensEverywhere, BiasesFirstTokens])
def test_a_wrong_bias_is_refused(wrong):
    refused(check_logit_bias, wrong)


@pytest.mark.refuses("bad_words")
@pytest.mark.parametrize("wrong", [ForbidsLastTokensEverywhere, ForbidsSingleTokensAlone])
def test_wrong_forbidden_words_are_refused(wrong):
    refused(check_bad_words, wrong)


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


def test_a_row_that_would_be_empty_is_left_alone():
    sampler, *_ = prepared([make("bad_words", words="a\nb\nc")], {"target": TableModel("abc")}, [0])
    row = torch.tensor([[1.0, 2.0, REMOVED]])
    assert torch.equal(sampler.apply(row, [[0]]), row)


@pytest.mark.parametrize("biases", ["dog", "dog: much", ": 3", "dog: 1e9", "dog: nan"])
def test_a_line_that_is_no_bias_is_refused(biases):
    with pytest.raises(Refusal, match="not a bias"):
        make("logit_bias", biases=biases)


def test_a_phrase_may_contain_a_colon_and_a_bias_may_exclude():
    assert make("logit_bias", biases="a: b: -inf\n\n c :2").biases


# --- length ---


def check_min_new_tokens(cls: type[Sampler]) -> None:
    for start, count in ((1, 3), (2, 1), (3, 6)):
        library = MinNewTokensLengthLogitsProcessor(start, count, END)
        expected = by_the_library(lambda history, library=library: library)
        assert torch.equal(begun(cls(count=count), start).apply(rows(), histories()), expected)


def check_ignore_end(cls: type[Sampler]) -> None:
    expected = by_the_library(lambda history: SuppressTokensLogitsProcessor([END]))
    assert torch.equal(begun(cls()).apply(rows(), histories()), expected)


class CountsThePrompt(find("min_new_tokens")):
    def begin(self, start, piece, end_ids=frozenset()):
        super().begin(0, piece, end_ids)


class OneTokenMore(find("min_new_tokens")):
    def __post_init__(self):
        self.count += 1


class StopsIgnoring(find("ignore_end")):
    """Wrong: after three tokens the text may end."""

    def apply(self, scores, histories):
        changed = super().apply(scores, histories)
        return torch.stack([new if len(history) < 3 else old for new, old, history in zip(changed, scores, histories)])


@pytest.mark.oracle("min_new_tokens")
def test_the_end_is_removed_as_long_as_the_library_removes_it():
    check_min_new_tokens(find("min_new_tokens"))


@pytest.mark.refuses("min_new_tokens")
@pytest.mark.parametrize("wrong", [CountsThePrompt, OneTokenMore])
def test_a_wrong_minimum_is_refused(wrong):
    refused(check_min_new_tokens, wrong)


@pytest.mark.oracle("ignore_end")
def test_the_end_is_removed_from_every_row():
    check_ignore_end(find("ignore_end"))


@pytest.mark.refuses("ignore_end")
def test_an_end_that_returns_is_refused():
    refused(check_ignore_end, StopsIgnoring)


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
