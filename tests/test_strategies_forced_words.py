"""Beam search for texts that contain given words, against the most probable of all texts that do."""
from __future__ import annotations

import itertools

import pytest
from registry import Collapse
from runs import run
from tables import TableModel

from playground.contract import Decoder, find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from strategies.search import forced_words as module
from strategies.search.forced_words import Missing, begun, contains

ForcedWords = find("forced_words")
WIDE = {"beams": 64, "length_exponent": 0.0}
COLLAPSES = {
    "forced_words": [
        Collapse(LaneConfig("forced_words", {"beams": width, "length_exponent": exponent}),
                 LaneConfig("beam_search", {"beams": width, "length_exponent": exponent}))
        for width, exponent in ((1, 1.0), (3, 0.0), (4, 1.0))
    ]
}
LENGTH = 4
CASES = [("b", "abc", ""), ("ca\nb", "abc", ""), ("cc", "abc", ""), ("ab\nba", "ab", ""), ("b", "abe", "e")]


def probability(model: TableModel, text: tuple[int, ...]) -> float:
    return sum(float(model.scores((0, *text[:i])).log_softmax(-1)[token]) for i, token in enumerate(text))


def likeliest(model: TableModel, words: list[str]) -> str:
    """The most probable of all texts with these words: those that end, and those of the full length that do not."""
    found = {}
    for length in range(1, LENGTH + 1):
        for text in itertools.product(range(len(model.letters)), repeat=length):
            ended = text[-1] in model.end_ids
            whole = not set(text[:-1]) & model.end_ids and (ended or length == LENGTH)
            written = "".join(model.letters[token] for token in text)
            if whole and all(word in written for word in words):
                found[written] = probability(model, text)
    return max(found, key=found.get)


def written(cls: type[Decoder], model: TableModel, **knobs) -> str:
    ids = run(Assembly(cls(**knobs)), {"target": model}, [0], LENGTH)[0].main.written
    return "".join(model.letters[token] for token in ids)


def check_forced(cls: type[Decoder]) -> None:
    """A search as wide as the texts are many finds the likeliest of those with all words."""
    for seed, (words, letters, ends) in enumerate(CASES):
        model = TableModel(letters, ends, seed=seed + 1)
        assert written(cls, model, words=words, **WIDE) == likeliest(model, words.splitlines())


class OneWordIsEnough(ForcedWords):
    def decode(self, lm):
        self.words = self.words.splitlines()[0][:1]
        return super().decode(lm)


class MayEndTooEarly(ForcedWords):
    """Wrong: texts that lack a word rank like the others."""

    def decode(self, lm):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.ForcedBeams, "lacks", lambda beams, beam: False)
            yield from super().decode(lm)


@pytest.mark.oracle("forced_words")
def test_a_wide_search_finds_the_likeliest_text_with_all_words():
    check_forced(ForcedWords)


@pytest.mark.refuses("forced_words")
@pytest.mark.parametrize("wrong", [OneWordIsEnough, MayEndTooEarly])
def test_a_search_that_drops_words_is_refused(wrong):
    with pytest.raises(AssertionError):
        check_forced(wrong)


@pytest.mark.strategy("forced_words")
@pytest.mark.parametrize("seed", range(4))
def test_a_narrow_search_finds_the_words_too_where_plain_beams_do_not(seed):
    model = TableModel("abcd", seed=seed)
    unlikely = min("abcd", key=written(ForcedWords, model, beams=2).count)
    assert unlikely * 2 not in written(ForcedWords, model, beams=2)
    assert unlikely * 2 in written(ForcedWords, model, words=unlikely * 2, beams=2)


def test_phrases_are_counted_token_by_token():
    missing = Missing([[(1, 2, 3)], [(4,), (5, 6)]])
    assert [missing.tokens(text) for text in ([], [1], [1, 2], [1, 2, 1], [1, 2, 3], [1, 2, 3, 5], [4, 1])] == [
        0, 1, 2, 1, 3, 4, 2
    ]
    assert missing.following([1, 2]) == {3, 1, 4, 5} and missing.following([1, 2, 3, 5, 6]) == set()
    assert missing.found([1, 2, 3, 4]) == 2 and contains([1, 2], ()) and begun([1, 1, 2], (1, 2, 3)) == 2
