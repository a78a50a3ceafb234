"""Draft tokens copied from what was read or written before: suffix decoding, prompt lookup, aggressive decoding."""
from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from random import Random

import pytest
import torch
from drafting_runs import letters, passes, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import TableModel

from playground.algorithms.speculative.suffix_index import BREAK, SuffixIndex
from playground.algorithms.speculative.verification import reject
from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.decoding.visitor_memory import Memory
from playground.events import Failed
from strategies.speculative.suffix_decoding import ScoredDraft, SuffixDecoding
from support.commits import ids
from support.laws import EXACT, WRONG
from support.speculation import Judged, collapses, off, speculative_lane

COLLAPSES = {
    "suffix_decoding": collapses("suffix_decoding", alpha=0),
    "aggressive": collapses("aggressive", block=0),
}


# --- continuations of every suffix ---

def stored(*texts: Iterable[int]) -> SuffixIndex:
    store = SuffixIndex()
    for text in texts:
        store.begin()
        for token in text:
            store.add([token])
    return store


def count(texts: list[list[int]], words: list[int]) -> int:
    """How often these words occur in the texts, one by one."""
    return sum(text[i:i + len(words)] == words for text in texts for i in range(len(text) - len(words) + 1))


some_texts = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=4)


@settings(deadline=None, max_examples=120)
@given(texts=some_texts, context=st.lists(st.integers(0, 2), min_size=1, max_size=6), kept=st.integers(0, 4))
def test_suffix_counts_equal_those_by_hand_before_and_after_texts_are_dropped(
    texts, context, kept
):
    store, left = stored(*texts), texts[-kept:] if kept else []
    for known in (texts, left):
        found = dict(store.occurrences(context))
        endings = {n: context[-n:] for n in range(1, len(context) + 1)}
        assert {n: len(places) for n, places in found.items()} == {
            n: count(known, words) for n, words in endings.items() if count(known, words)
        }
        for n, places in found.items():
            followers = {token: len(after) for token, after in store.followers(places).items()}
            assert followers == {token: many for token in range(3) if (many := count(known, [*endings[n], token]))}
            assert sum(followers.values()) <= len(places)
        store.keep_last(kept)
        assert store.digest() == stored(*left).digest()


def guess(texts: list[list[int]], context: list[int], budget: int = 64, **knobs):
    return find("suffix_decoding")(**knobs).best_draft(stored(*texts), context, budget)


@pytest.mark.parametrize("text, expected, match", [("abcabcab", "cab", 5), ("xabyabxab", "yab", 3)])
def test_suffix_decoding_proposes_the_draft_of_a_worked_example(text, expected, match):
    found = guess([letters(text)], letters(text))
    assert (found.tree.tokens, found.match, found.score) == (letters(expected), match, 1.5)


def by_the_paper(
    texts: list[list[int]], context: list[int], depth: int, alpha: float, least: float
) -> tuple[float, int]:
    """Score and length of the best draft, by trying every suffix and recounting every frequency. Ties go to the last
    one read.
    """
    best = (0.0, 0)
    context = context[-depth:]
    for match in range(1, len(context)):
        words, chance, score, length = context[-match:], 1.0, 0.0, 0
        while length < min(int(alpha * match + 1e-6), depth - match) and count(texts, words):
            after = {token: count(texts, [*words, token]) for token in range(3)}
            chance *= max(after.values()) / count(texts, words)
            if not any(after.values()) or chance < least:
                break
            words, score, length = (
                [*words, max(after, key=lambda token: (after[token], last_read(texts, [*words, token])))],
                score + chance,
                length + 1,
            )
        if score and score >= best[0]:
            best = (score, length)
    return best


def last_read(texts: list[list[int]], words: list[int]) -> tuple[int, int]:
    return max(
        (
            (number, i)
            for number, text in enumerate(texts)
            for i in range(len(text))
            if text[i : i + len(words)] == words
        ),
        default=(-1, -1),
    )


@pytest.mark.oracle("suffix_decoding")
@settings(deadline=None, max_examples=150)
@given(texts=some_texts, context=st.lists(st.integers(0, 2), min_size=1, max_size=9), depth=st.sampled_from([4, 8]),
       alpha=st.sampled_from([0.5, 1.0, 2.5]), least=st.sampled_from([0.1, 0.3, 0.9]))
def test_suffix_decoding_equals_a_search_over_all_suffixes(texts, context, depth, alpha, least):
    found = guess(texts, context, depth=depth, alpha=alpha, min_prob=least)
    score, length = by_the_paper(texts, context, depth, alpha, least)
    assert found.score == pytest.approx(score) and len(found.tree) == length


def check_suffix_decoding(drafter: type[SuffixDecoding]) -> None:
    """Score and length of the draft equal those of a search over all suffixes; half of the contexts are copied from a
    text.
    """
    for seed in range(60):
        chance = Random(seed)
        texts = [[chance.randrange(3) for _ in range(chance.randrange(25))] for _ in range(chance.randrange(1, 5))]
        context = [chance.randrange(3) for _ in range(chance.randrange(2, 10))]
        if seed % 2 and len(texts[0]) > 9:
            context = texts[0][3:3 + len(context)]
        alpha, least = chance.choice([0.5, 1.0, 2.5]), chance.choice([0.1, 0.3, 0.9])
        found = drafter(depth=8, alpha=alpha, min_prob=least).best_draft(stored(*texts), context, 64)
        score, length = by_the_paper(texts, context, 8, alpha, least)
        assert found.score == pytest.approx(score) and len(found.tree) == length


@pytest.mark.oracle("suffix_decoding")
def test_in_longer_texts_the_suffix_with_most_expected_tokens_is_chosen():
    check_suffix_decoding(SuffixDecoding)


class TakesTheLongestEnding(SuffixDecoding):
    """Ranks suffixes by length instead of the expected number of accepted tokens."""

    def best_draft(self, store, context, budget, ends=lambda token: False):
        guesses = [(match, *self._grow(store, places, *self._limits(match), ends))
                   for match, places in self._suffixes(store, context)]
        found = [ScoredDraft(tree, match, score) for match, tree, score in guesses if score]
        return max(found, key=lambda guess: guess.match, default=ScoredDraft())


class CountsFollowersAlone(SuffixDecoding):
    """An occurrence at the end of a text, which nothing follows, does not count against the others."""

    def _push(self, store, waiting, chance, parent, depth, places):
        return super()._push(store, waiting, chance, parent, depth, sum(store.followers(places).values(), []) and [
            place for place in places if place < len(store.tokens) and store.tokens[place] != BREAK])


class GuessesAlwaysAsFar(SuffixDecoding):
    """The length of a draft does not grow with the length of the match."""

    def _limits(self, match):
        return super()._limits(max(match, 3))


def chances_after(texts: list[list[int]], words: list[int], path: int, least: float) -> list[float]:
    """Estimated probability of each continuation of at most `path` tokens, each a node of the tree, largest first."""
    found, level = [], [(words, 1.0)] if count(texts, words) else []
    for _ in range(path):
        level = [
            ([*ending, token], chance * count(texts, [*ending, token]) / count(texts, ending))
            for ending, chance in level
            for token in range(3)
        ]
        level = [(ending, chance) for ending, chance in level if chance >= least]
        found += [chance for _, chance in level]
    return sorted(found, reverse=True)


def check_trees(drafter: type[SuffixDecoding]) -> None:
    """The score of a tree is the largest sum of that many of these probabilities, over all suffixes."""
    wider = 0
    for seed in range(40):
        chance = Random(seed)
        texts = [[chance.randrange(3) for _ in range(chance.randrange(20))] for _ in range(4)]
        context, depth = texts[0][:5] or [0, 1], chance.choice([3, 5, 8])
        found = drafter(depth=depth, alpha=2.5, min_prob=0.1, branching=True).best_draft(stored(*texts), context, 64)
        scores = [
            sum(chances_after(texts, context[-match:], depth - match, 0.1)[: int(2.5 * match)])
            for match in range(1, len(context[-depth:]))
        ]
        assert found.score == pytest.approx(max(scores, default=0.0))
        assert not len(found.tree) or found.tree.depth() <= depth - found.match
        wider += len(found.tree) > depth - found.match > 0
    assert wider, "no tree had more nodes than its longest path may have"


@pytest.mark.oracle("suffix_decoding")
def test_the_index_depth_bounds_the_depth_of_a_draft_tree_but_not_its_nodes():
    check_trees(SuffixDecoding)


class BoundsTheNodesByTheDepth(SuffixDecoding):
    def _limits(self, match):
        nodes, path = super()._limits(match)
        return min(nodes, path), path


@pytest.mark.refuses("suffix_decoding")
def test_a_tree_limited_to_the_nodes_of_a_path_is_detected():
    with pytest.raises(AssertionError):
        check_trees(BoundsTheNodesByTheDepth)


@pytest.mark.refuses("suffix_decoding")
@pytest.mark.parametrize("wrong", [TakesTheLongestEnding, CountsFollowersAlone, GuessesAlwaysAsFar],
                         ids=lambda cls: cls.__name__)
def test_a_wrong_suffix_search_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_suffix_decoding(wrong)


def test_doubling_the_suffix_doubles_the_draft_up_to_the_depth():
    text = list(range(40))
    lengths = [len(guess([text], [99, *text[:match]], depth=16).tree) for match in (2, 4, 8, 12)]
    assert lengths == [2, 4, 8, 8], "of twelve known tokens the last eight may guess eight"


def test_if_only_certain_draft_tokens_count_drafts_come_from_earlier_texts_alone():
    text = letters("abcab")
    assert len(guess([text], text, min_prob=1.0).tree) == 0, "its own end has nothing after it"
    assert guess([letters("abcd")], letters("xxab"), min_prob=1.0).tree.tokens == letters("cd")


def test_a_suffix_tree_takes_the_most_frequent_paths_including_the_chain():
    texts = [letters(text) for text in ("abcd", "abcd", "abce", "abx")]
    tree = guess(texts, letters("zab"), alpha=2.0, branching=True).tree
    assert [tuple(tree.prefix(node)) for node in range(len(tree))] == [
        tuple(letters(path)) for path in ("c", "cd", "x", "ce")
    ]
    assert guess(texts, letters("zab"), alpha=2.0).tree.tokens == letters("cd")


def test_nothing_is_drafted_after_an_end_token():
    drafter = make("suffix_decoding", alpha=4.0)
    assert drafter.best_draft(
        stored(letters("abcde")), letters("xab"), 9, ends=lambda token: token == 3
    ).tree.tokens == letters("cd")


def suffixes(**knobs) -> LaneConfig:
    return speculative_lane("suffix_decoding", "greedy_match", **knobs)


def test_a_repeated_answer_takes_few_forwards_for_the_same_visitor_only():
    memory = Memory()
    (cold, first), (warm, second), (other, _) = (
        recorded(suffixes(), kept, length=60) for kept in (memory, memory, Memory())
    )
    assert ids(first) == ids(second) and passes(other) == passes(cold)
    assert passes(warm) <= 1 + 6 + 2, "guesses double from one token on until answer and guess fill the depth"
    assert passes(cold) > 2 * passes(warm)


def remembered(memory: Memory) -> list[int]:
    (store,) = memory._things.values()
    return store.tokens[store.starts[0]:]


class Poisoned(find("suffix_decoding")):
    """Stores rejected draft tokens as if they had been committed."""

    def observe(self, tree, rows, verdict):
        self._past.add(tree.tokens)


@pytest.mark.parametrize(
    "cls, right", [(find("suffix_decoding"), True), (Poisoned, False)], ids=["kept", "refused too"]
)
def test_memory_holds_complete_texts_without_prompts_and_rejected_draft_tokens(cls, right):
    assembly, memory = assemble(suffixes()), Memory()
    assembly.decoder.drafter = cls(alpha=4.0)
    model = TableModel("abcde", seed=2)
    for prompt in ([0, 1, 0, 1, 0], [2, 3, 2, 3]):
        lane = write_with(assembly, model, prompt, memory)
        written = [BREAK, *lane.tokens[len(prompt):]]
        assert (remembered(memory)[-len(written):] == written) == right


def write_with(assembly: Assembly, model: TableModel, prompt: list[int], memory: Memory) -> Lane:
    """Run one lane of a visitor with memory to its end."""
    lane = Lane(prompt, {"target": model}, deepcopy(assembly), Limits(0, 20), Silent(model.tokens), memory=memory)
    runner = Runner(lane, lane.assembly)
    while not runner.finished:
        assert not [event for event in runner.advance() if isinstance(event, Failed)]
    return lane


def test_memory_drops_its_oldest_answers_and_a_limit_of_zero_leaves_it_unused():
    memory = Memory()
    for prompt in ("one", "two", "three"):
        _, events = recorded(suffixes(requests=2), memory, prompt, length=8)
    before = list(remembered(memory))
    assert before.count(BREAK) == 2 and before[-8:] == ids(events)
    recorded(suffixes(requests=0), memory, "four", length=8)
    assert remembered(memory) == before


class TakenForDrawn(find("suffix_decoding")):
    """The most frequent follower, declared as sampled by its frequency."""

    drawn = "independent"

    def propose(self, lm, budget):
        yield from ()
        tree = TokenTree(self.name, self.drawn)
        if budget:
            q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
            tree.add(0, ROOT, q)
        return tree


@pytest.mark.refuses("suffix_decoding")
def test_frequencies_are_not_reported_as_draft_probabilities():
    assert off(TakenForDrawn(), Judged(reject)) > WRONG
    assert off(make("suffix_decoding", alpha=4.0), Judged(reject)) < EXACT
