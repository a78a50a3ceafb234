"""Static items: the trie as a matrix, against a trie of dictionaries."""
from __future__ import annotations

import random
from itertools import product
from statistics import median
from time import perf_counter

import pytest
import torch
from runs import run
from tables import TableModel, write

from playground.contract import Decoder, find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from strategies.constrained.static.csr_trie import ROOT, CsrTrie

Items = list[list[int]]


def random_items(seed: int, vocabulary: int = 40, count: int = 30, length: int = 6, ragged: bool = False) -> Items:
    """None is a prefix of another: each ends with a unique token."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, length - 1) if ragged else length - 1 for _ in range(count)]
    return [
        [chance.randrange(1, 6 if i % 2 else vocabulary) for _ in range(size)] + [0] for i, size in enumerate(lengths)
    ]


def children(items: Items, prefix: tuple[int, ...]) -> set[int]:
    return {item[len(prefix)] for item in items if tuple(item[:len(prefix)]) == prefix and len(item) > len(prefix)}


def prefixes(items: Items) -> set[tuple[int, ...]]:
    return {tuple(item[:i]) for item in items for i in range(len(item))}


def walk(trie: CsrTrie, prefix: tuple[int, ...]) -> int:
    """State after a prefix; fails where an edge is missing."""
    state = ROOT
    for depth, token in enumerate(prefix):
        tokens, states, count = trie.following(torch.tensor([state]), depth)
        [place] = ((tokens[0] == token) & count[0]).nonzero()[:, 0].tolist()
        state = int(states[0, place])
    return state


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_the_transition_matrix_equal_the_trie(seed, ragged):
    items = random_items(seed, ragged=ragged)
    trie = CsrTrie(items, 40)
    for prefix in prefixes(items):
        tokens, _, count = trie.following(torch.tensor([walk(trie, prefix)]), len(prefix))
        assert tokens[count].tolist() == sorted(children(items, prefix))
    assert all(trie.complete(walk(trie, tuple(item))) for item in items)
    assert trie.edges == len({tuple(item[:i]) for item in items for i in range(2, len(item) + 1)})
    assert trie.widest == [
        max(len(children(items, prefix)) for prefix in prefixes(items) if len(prefix) == depth)
        for depth in range(trie.length)
    ]


@pytest.mark.parametrize("items", [[], [[]], [[1, 2], [1, 2, 3]]])
def test_indistinguishable_items_are_refused(items):
    with pytest.raises(ValueError):
        CsrTrie(items, 9)


def test_the_order_of_items_and_their_repeats_do_not_matter():
    items = random_items(3)
    once, again = CsrTrie(items, 40), CsrTrie(items[::-1] + items[:9], 40)
    assert torch.equal(once.packed, again.packed) and torch.equal(once.indptr, again.indptr)


@pytest.mark.slow
def test_a_step_takes_no_longer_with_a_thousand_times_the_items():
    """Medians of 200 steps of 16 beams; a search through all items would take a hundred times longer."""
    taken = []
    for count in (100, 100_000):
        chance = torch.Generator().manual_seed(0)
        rows = torch.randint(0, 30, (count, 6), generator=chance)
        trie = CsrTrie(rows.tolist() if count < 1000 else rows.unique(dim=0).tolist(), 30)
        states = torch.randint(1, 31, (16,), generator=chance)
        taken.append(median(clocked(lambda trie=trie, states=states: trie.following(states, 1)) for _ in range(200)))
    assert taken[1] < 5 * taken[0]


def clocked(act) -> float:
    start = perf_counter()
    act()
    return perf_counter() - start


LETTERS = "abcdefg!"  # the last ends a text


def table(seed: int) -> TableModel:
    return TableModel(LETTERS, "!", seed)


def words(seed: int, count: int = 14) -> list[str]:
    chance = random.Random(seed)
    return list(dict.fromkeys("".join(chance.choices("abcdefg", k=chance.randint(1, 4))) for _ in range(count)))


def search(model: TableModel, items: list[str], beams: int):
    return write(
        assemble(LaneConfig("static", {"items": "|".join(items), "beams": beams})),
        {"target": model},
        [0, 1],
        Limits(0, 12),
        Draws(0),
    )


def chance_of(model: TableModel, text: str) -> float:
    """Log-probability of a text and its end after the prompt."""
    ids = [LETTERS.index(letter) for letter in f"{text}!"]
    return sum(float(model.scores((0, 1, *ids[:i])).log_softmax(-1)[token]) for i, token in enumerate(ids))


def found_by_dictionaries(model: TableModel, items: list[str], beams: int) -> str:
    """Beam search over strings; whole items stay in the competition."""
    pool = [("", 0.0)]
    while any(not text.endswith("!") for text, _ in pool):
        whole = [entry for entry in pool if entry[0].endswith("!")]
        growing = [text + letter for text, _ in pool if not text.endswith("!") for letter in LETTERS]
        longer = [text for text in growing if any(f"{item}!".startswith(text) for item in items)]
        pool = sorted(
            [*whole, *((text, chance_of_beginning(model, text)) for text in longer)], key=lambda entry: -entry[1]
        )[:beams]
    return pool[0][0][:-1]


def chance_of_beginning(model: TableModel, text: str) -> float:
    return chance_of(model, text[:-1]) if text.endswith("!") else chance_of(model, text) - float(
        model.scores((0, 1, *map(LETTERS.index, text))).log_softmax(-1)[LETTERS.index("!")])


@pytest.mark.oracle("static")
@pytest.mark.parametrize("beams", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_the_search_equals_a_search_over_dictionaries(seed, beams):
    model, items = table(seed), words(seed)
    lane = search(model, items, beams)
    assert lane.text in items and lane.reason == "end"
    assert lane.text == found_by_dictionaries(model, items, beams)


@pytest.mark.parametrize("seed", range(6))
def test_with_as_many_beams_as_items_the_most_probable_item_is_found(seed):
    model, items = table(seed), words(seed)
    assert search(model, items, 64).text == max(items, key=lambda item: chance_of(model, item))


def test_a_single_item_is_always_written():
    assert search(table(1), ["gfedc"], 4).text == "gfedc"


@pytest.mark.refuses("static")
def test_unmasked_padding_of_a_row_is_detected(monkeypatch):
    """The search would leave the items, since other rows of the matrix follow."""
    following = CsrTrie.following

    def unmasked(self, states, depth):
        tokens, after, count = following(self, states, depth)
        return tokens, after, torch.ones_like(count)

    monkeypatch.setattr(CsrTrie, "following", unmasked)
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(6):
            assert search(table(seed), words(seed), 4).text in words(seed)


@pytest.mark.parametrize(
    "items, length, says",
    [
        ("|", 12, "no item to choose"),
        ("abcdefg", 3, "7 tokens, and 3 can be written"),
        ("abc|xyz", 12, "no tokens for the item 'xyz'"),
    ],
)
def test_items_that_cannot_be_searched_are_refused(items, length, says):
    with pytest.raises((Refusal, AssertionError), match=says):
        write(
            assemble(LaneConfig("static", {"items": items})), {"target": table(0)}, [0, 1], Limits(0, length), Draws(0)
        )


Static = find("static")
ALPHABET = "abcd!"  # the last ends a text
ITEMS = ["a", "ab", "abc", "bca", "bd", "cab", "dd", "dcba"]


def item_logp(model: TableModel, text: str) -> float:
    ids = [ALPHABET.index(letter) for letter in text]
    return sum(float(model.scores((0, 1, *ids[:i])).log_softmax(-1)[token]) for i, token in enumerate(ids))


def best_item(model: TableModel, beams: int) -> str:
    """Beam search over strings: prefixes of items grow, and complete items stay among the candidates."""
    pool = [""]
    while any(not text.endswith("!") for text in pool):
        grown = {f"{item}!"[: len(text) + 1] for text in pool for item in ITEMS if f"{item}!".startswith(text)}
        pool = sorted(grown, key=lambda text: -item_logp(model, text))[:beams]
    return pool[0][:-1]


def check_static(cls: type[Decoder]) -> None:
    for seed, beams in product(range(8), (1, 2, 4)):
        model = TableModel(ALPHABET, "!", seed)
        lane, _ = run(Assembly(cls("|".join(ITEMS), beams)), {"target": model}, [0, 1], 12)
        assert lane.text == best_item(model, beams)


class TheShortestItem(Static):
    """Returns the first item that was complete."""

    def _chosen(self, lm, done):
        return super()._chosen(lm, sorted(done, key=lambda beam: beam.leaf.generated))


class OneBeamMore(Static):
    def _trie(self, lm, device):
        self.beams += 1
        return super()._trie(lm, device)


class ForgetsTheBeginning(Static):
    def _candidates(self, trie, rows, live, depth):
        for beam in live:
            beam.score = 0.0
        return super()._candidates(trie, rows, live, depth)


class RenormalisesTheLegal(Static):
    """Renormalises log-probabilities over the allowed tokens, which favours prefixes without alternatives."""

    def _candidates(self, trie: CsrTrie, rows, live, depth):
        sums, tokens, states = super()._candidates(trie, rows, live, depth)
        before = torch.tensor([[beam.score] for beam in live], dtype=sums.dtype)
        return before + (sums - before).log_softmax(-1), tokens, states


@pytest.mark.oracle("static")
def test_static_finds_what_an_exhaustive_search_over_strings_finds():
    check_static(Static)


@pytest.mark.refuses("static")
@pytest.mark.parametrize("wrong", [TheShortestItem, OneBeamMore, ForgetsTheBeginning, RenormalisesTheLegal])
def test_a_wrong_static_is_refused(wrong):
    with pytest.raises(AssertionError):
        check_static(wrong)
