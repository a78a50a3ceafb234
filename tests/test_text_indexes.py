"""Indexes of texts that grow find what a scan finds, at a cost that hardly grows with the text."""
from __future__ import annotations

import random
from copy import deepcopy
from time import thread_time

import pytest
from pace import here

from playground.algorithms.speculative.ngram_index import NGramIndex
from playground.algorithms.speculative.suffix_index import FEW, SuffixIndex
from playground.contract import make


def scanned(text: list[int], ngram: list[int], end: int) -> list[int]:
    starts = range(min(end, len(text) - len(ngram) + 1))
    return [start for start in starts if text[start:start + len(ngram)] == ngram]


def test_an_n_gram_index_finds_what_a_scan_finds_while_a_text_grows_and_is_cut():
    chooser, text, indexes = random.Random(0), [], [NGramIndex(n) for n in (1, 2, 3)]
    for _ in range(200):
        del text[len(text) - chooser.randrange(min(len(text), 4) + 1):]
        text += [chooser.randrange(3) for _ in range(chooser.randrange(6))]
        for index in indexes:
            index.follow(text)
            ngram, end = [chooser.randrange(3) for _ in range(index.n)], chooser.randrange(len(text) + 1)
            found = scanned(text, ngram, end)
            expected = (found[0], found[-1]) if found else (None, None)
            assert (index.earliest(ngram, end), index.latest(ngram, end)) == expected


def test_many_positions_are_filtered_and_grouped_like_few():
    chooser = random.Random(1)
    text = [chooser.randrange(3) for _ in range(600)]
    store, context = SuffixIndex(), text[-5:]
    store.begin()
    store.add(text)
    found = dict(store.occurrences(context))
    assert len(found[1]) > FEW >= len(found[5])
    for length, places in found.items():
        expected = [start + length + 1 for start in scanned(text, context[-length:], len(text))]
        assert list(places) == expected
        followers: dict[int, list[int]] = {}
        for place in expected:
            if place <= len(text):
                followers.setdefault(text[place - 1], []).append(place + 1)
        assert {token: list(after) for token, after in store.followers(places).items()} == followers


def test_copies_share_a_text_and_continue_independently():
    store = SuffixIndex()
    store.begin()
    store.add([1, 2, 3])
    first, second = deepcopy(store), deepcopy(store)
    assert first._log is store._log
    first.add([4])
    second.add([5])
    assert (store.tokens, first.tokens, second.tokens) == ([-1, 1, 2, 3], [-1, 1, 2, 3, 4], [-1, 1, 2, 3, 5])
    assert [dict(each.occurrences([3])).get(1) for each in (store, first, second)] == [[4]] * 3
    assert [list(each.followers([4])) for each in (store, first, second)] == [[], [4], [5]]


def quickest(act) -> float:
    times = []
    for _ in range(5):
        start = thread_time()
        act()
        times.append(thread_time() - start)
    return min(times)


@pytest.mark.slow
def test_a_round_over_two_hundred_thousand_tokens_has_at_most_two_milliseconds_of_overhead():
    chooser = random.Random(2)
    words = [min(int(20 * chooser.paretovariate(0.9)), 20_000) for _ in range(200_000)]  # one in 23 is token 20
    store, drafter, lookup = SuffixIndex(), make("suffix_decoding"), make("prompt_lookup")
    store.begin()
    store.add(words)
    context, text = words[-63:] + [20], words[:32_000]
    lookup.look_up(text, 10)
    assert quickest(lambda: drafter.best_draft(store, context, 64)) < here(0.002)
    assert quickest(lambda: lookup.look_up(text, 10)) < here(0.002)
