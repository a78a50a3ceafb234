"""N-gram table: drafts by a search of the text from its end, the hash in 64-bit arithmetic of its own, and the law."""
from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from tables import distance, law, product_law

from playground.contract import find
from playground.errors import Refusal
from support.laws import AT_ONE, EXACT, tables
from support.speculation import collapses, speculative_lane

Table = find("ngram_mod")
COLLAPSES = {"ngram_mod": collapses("ngram_mod", most=0)}


def number(ngram: list[int], size: int) -> int:
    """By torch's 64-bit integers, which wrap around, read as unsigned ones."""
    found = torch.zeros((), dtype=torch.int64)
    for token in ngram:
        found = found * 6364136223846793005 + token
    return (int(found) + (1 << 64 if int(found) < 0 else 0)) % size


def by_hand(text: list[int], n: int, size: int, count: int, least: int) -> list[int]:
    """The last token of the text that follows an n-gram of the same number, again and again."""
    drafted: list[int] = []
    while len(text) >= n and len(drafted) < count:
        wanted = number([*text, *drafted][-n:], size)
        places = [place for place in range(n, len(text)) if number(text[place - n:place], size) == wanted]
        if not places:
            break
        drafted.append(text[places[-1]])
    return drafted if len(drafted) >= least else []


def drafted_by(drafter, text: list[int]) -> list[int]:
    """After a text that has grown in three steps."""
    for length in (len(text) // 3, len(text) // 2, len(text)):
        lm = SimpleNamespace(tokens=text[:length], generated=1, ends=lambda token: False)
        steps = drafter.propose(lm, 8)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            found = end.value.tokens
    return found


def cases() -> list[tuple[list[int], dict]]:
    """Texts of few tokens, tables in which many n-grams collide, and tables in which none do."""
    chance = random.Random(4)
    return [
        (chance.choices(range(3), k=chance.randint(1, 40)),
         {"n": chance.choice((1, 2, 3)), "size": chance.choice((5, 11, 65536)), "least": chance.choice((1, 3))})
        for _ in range(150)
    ]


def agree(cls) -> bool:
    found = [(drafted_by(cls(**knobs), text), by_hand(text, knobs["n"], knobs["size"], 8, knobs["least"]))
             for text, knobs in cases()]
    assert sum(bool(expected) for _, expected in found) > 50
    return all(mine == expected for mine, expected in found)


@pytest.mark.oracle("ngram_mod")
def test_drafts_are_those_of_a_search_of_the_text():
    assert agree(Table)


class EarliestCounts(Table):
    """Wrong: an entry is never replaced."""

    def read(self, text):
        known = dict(self._table)
        super().read(text)
        self._table.update(known)


class NeverCollides(Table):
    """Wrong: each n-gram has an entry of its own, instead of a slot that others may share."""

    def number(self, ngram):
        return tuple(ngram)


class WithoutWrapping(Table):
    """Wrong: numbers of any size, in place of a machine word."""

    def number(self, ngram):
        found = 0
        for token in ngram:
            found = found * 6364136223846793005 + token
        return found % self.size


class ReadsTheText(Table):
    """Wrong: the second draft token forgets the first."""

    def look_up(self, text, count, ends=lambda token: False):
        return super().look_up(text, min(count, 1), ends) * count


class SomeAreShort(Table):
    """Wrong: short drafts are used."""

    def look_up(self, text, count, ends=lambda token: False):
        self.least = 1
        return super().look_up(text, count, ends)


@pytest.mark.refuses("ngram_mod")
@pytest.mark.parametrize("wrong", [EarliestCounts, NeverCollides, WithoutWrapping, ReadsTheText, SomeAreShort])
def test_other_tables_are_detected(wrong):
    assert not agree(wrong)


def test_the_engines_number_of_an_ngram_beyond_a_machine_word():
    """Computed by hand: 1 * F + 2, of three tokens modulo 2**64, and modulo the size."""
    value = ((1 * 6364136223846793005 + 2) * 6364136223846793005 + 3) % 2**64
    assert Table(size=4194304).number([1, 2, 3]) == value % 4194304


def test_nothing_follows_the_end_of_a_text():
    drafter = Table(n=1)
    drafter.read([1, 2, 3, 1, 2, 3, 1])
    assert drafter.look_up([1], 6, lambda token: token == 2) == [2]
    assert drafter.look_up([1], 4) == [2, 3, 1, 2]


def test_drafts_that_are_longer_at_least_than_at_most_are_refused():
    with pytest.raises(Refusal, match="lower least"):
        Table(least=5, most=4).check()


@pytest.mark.oracle("ngram_mod")
def test_the_law_of_a_lane_is_the_targets():
    models = tables("abc")
    found = law(speculative_lane("ngram_mod", "rejection", AT_ONE, n=1, size=2), models, [0, 1, 0, 1], 3)
    assert distance(found, product_law(models["target"], [0, 1, 0, 1], 3)) < EXACT
