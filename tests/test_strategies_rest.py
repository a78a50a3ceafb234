"""REST drafts the most frequent continuations, in a datastore, of the longest suffix that occurs there."""
from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from tables import distance, law, product_law

from playground.algorithms.fairy_tales import tales
from playground.contract import find, make
from playground.contract.token_tree import TokenTree
from playground.errors import Refusal
from support.laws import AT_ONE, EXACT, tables
from support.speculation import collapses, speculative_lane

REST = find("rest")
BRIEF = {"rest": {"corpus": "abcabcacb", "shortest": 1}}
COLLAPSES = {"rest": collapses("rest", nodes=0)}
END = 0


def drafted(drafter, tokens: list[int], corpus: list[int], budget: int = 32) -> TokenTree:
    """The draft after these tokens, with this datastore."""
    lm = SimpleNamespace(tokens=tokens, generated=1, spell=lambda text: corpus, ends=lambda token: token == END)
    steps = drafter.propose(lm, budget)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The text of every node, in the order in which nodes were added."""
    return [tuple(tree.prefix(node)) for node in range(len(tree))]


def said(drafter, text: str, corpus: str, budget: int = 32) -> list[str]:
    return ["".join(map(chr, path)) for path in paths(drafted(drafter, *(list(map(ord, t)) for t in (text, corpus)),
                                                              budget))]


# --- brute force ---


def by_hand(drafter, tokens: list[int], corpus: list[int], budget: int) -> list[tuple[int, ...]]:
    """The `nodes` most frequent prefixes of all continuations, found by comparing every place of the datastore."""
    for n in range(min(drafter.longest, len(tokens)), drafter.shortest - 1, -1):
        places = [i + n for i in range(len(corpus)) if corpus[i:i + n] == tokens[-n:] and i + n < len(corpus)]
        texts = [until_end(corpus[place:place + min(drafter.length, budget)]) for place in places]
        prefixes = [tuple(text[:k]) for text in texts for k in range(1, len(text) + 1)]
        if prefixes:
            order = sorted(set(prefixes), key=lambda p: (-prefixes.count(p), len(p), prefixes.index(p)))
            return order[:drafter.nodes]
    return []


def until_end(text: list[int]) -> list[int]:
    return text[:text.index(END) + 1] if END in text else text


def random_case(chance: random.Random) -> tuple[dict, list[int], list[int], int]:
    """Knobs, text, datastore and budget. Few letters make for many occurrences, and some texts end on the way."""
    knobs = {"nodes": chance.choice([1, 5, 20, 64]), "length": chance.choice([1, 4, 10]),
             "longest": chance.choice([2, 3, 5]), "shortest": chance.choice([1, 2])}
    sizes = chance.randint(1, 9), chance.choice([0, 60, 120])
    text, datastore = (chance.choices(range(4), [1, 8, 8, 4], k=size) for size in sizes)
    return knobs, text, datastore, chance.choice([0, 3, 8, 8])


CHANCE = random.Random(1)
CASES = [random_case(CHANCE) for _ in range(60)]


@pytest.mark.oracle("rest")
def test_the_draft_equals_a_brute_force_search():
    found = [(paths(drafted(make("rest", **knobs), *case)), by_hand(make("rest", **knobs), *case))
             for knobs, *case in CASES]
    assert all(tree == expected for tree, expected in found)
    assert sum(len(tree) > 5 for tree, _ in found) > 10, "too few of the cases draft a tree"


class TakesTheShortestSuffix(REST):
    def look_up(self, text, budget, ends):
        return super().look_up(text[-self.shortest:], budget, ends)


class StartsAtTheMatch(REST):
    def look_up(self, text, budget, ends):
        found = super().look_up(text, budget, ends)
        found.texts = [[text[-1], *later][:min(self.length, budget)] for later in found.texts]
        return found


class KeepsTheRarest(REST):
    def grown(self, texts):
        counts = [texts.count(text) for text in texts]
        return super().grown([text for text in texts if texts.count(text) == min(counts)])


class DraftsOneChain(REST):
    def grown(self, texts):
        return super().grown(texts[:1])


class GoesOnAfterTheEnd(REST):
    def look_up(self, text, budget, ends):
        return super().look_up(text, budget, lambda token: False)


class CountsEachContinuationOnce(REST):
    def grown(self, texts):
        return super().grown([list(text) for text in dict.fromkeys(map(tuple, texts))])


@pytest.mark.refuses("rest")
@pytest.mark.parametrize("wrong", [TakesTheShortestSuffix, StartsAtTheMatch, KeepsTheRarest, DraftsOneChain,
                                   GoesOnAfterTheEnd, CountsEachContinuationOnce])
def test_a_wrong_draft_is_refused(wrong):
    assert any(paths(drafted(wrong(**knobs), *case)) != by_hand(make("rest", **knobs), *case) for knobs, *case in CASES)


@pytest.mark.oracle("rest")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_output_distribution_is_the_targets(verifier):
    config = speculative_lane("rest", verifier, AT_ONE, corpus="abcabacbabc", shortest=1, length=2)
    models = tables("abc")
    assert distance(law(config, models, [0, 1, 0], 3), product_law(models["target"], [0, 1, 0], 3)) < EXACT


# --- in words ---


def test_the_more_frequent_continuation_comes_first_and_the_other_is_its_sibling():
    assert said(make("rest", length=2), "ab", "abc abd abc") == ["c", "d", "c ", "d "]


def test_pruning_by_frequency_leaves_a_tree():
    assert said(make("rest", length=3, nodes=2), "ab", "abcx abcy abd") == ["c", "d"]
    assert said(make("rest", length=2, nodes=2), "ab", "abcd abcd abe") == ["c", "cd"]


def test_shorter_suffixes_are_used_only_without_a_longer_match():
    assert said(make("rest", length=1), "xab", "xabc abd abd") == ["c"]
    assert said(make("rest", length=1), "yab", "xabc abd abd") == ["d", "c"]


def test_an_occurrence_at_the_end_of_the_datastore_has_no_continuation():
    assert said(make("rest", length=1), "xab", "abd xab") == ["d"]


def test_a_suffix_shorter_than_the_shortest_is_not_looked_up():
    assert said(make("rest", shortest=3, length=1), "ab", "abc abc") == []


def test_draft_probabilities_are_shares_of_the_continuations():
    tree = drafted(make("rest", length=2), [1, 2], [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 6, 1, 2, 3, 4])
    assert dict(zip(paths(tree), tree.confidence)) == {
        (3,): 3 / 4, (3, 4): 2 / 3, (3, 5): 1 / 3, (6,): 1 / 4, (6, 6): 1.0}


def test_without_a_corpus_the_fairy_tales_are_the_datastore():
    lm = SimpleNamespace(tokens=list(map(ord, "Once upon a tim")), generated=0,
                         spell=lambda text: list(map(ord, text)), ends=lambda token: False)
    rest = make("rest", length=2)
    with pytest.raises(StopIteration) as end:
        next(rest.propose(lm, 8))
    assert "tim" in tales() and paths(end.value.value)[0] == (ord("e"),)


def test_a_shortest_suffix_above_the_longest_is_refused():
    with pytest.raises(Refusal, match="shortest"):
        make("rest", shortest=5, longest=3)
