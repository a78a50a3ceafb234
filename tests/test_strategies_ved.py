"""VED: a constrained beam search, then an expansion of the trie where value and entropy are high."""
from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from runs import figures, run
from tables import TableModel, Text

from playground.contract import find, make
from playground.errors import Refusal
from playground.events import Forward, Note
from strategies.search.ved import ItemPrefix
from support.scripted_rewards import hashed, scripted

VED = find("ved")
BRIEF = {"ved": {"reward": "likelihood", "items": "a|b"}}
LETTERS, PROMPT = "abcd.", [0, 1]
MODEL = TableModel(LETTERS, ".", seed=6)
ITEMS = ["".join(item) for item in product("abc", repeat=3)] + ["d", "da", "dabc"]


def tokens(item: str) -> Text:
    return tuple(LETTERS.index(letter) for letter in item + ".")


TEXTS = [tokens(item) for item in ITEMS]


def valid_logp(text: Text) -> float:
    """Log-probability of a text among the items, renormalised at every token over those that continue an item."""
    total = 0.0
    for i, token in enumerate(text):
        valid = sorted({item[i] for item in TEXTS if item[:i] == text[:i] and len(item) > i})
        row = MODEL.scores((*PROMPT, *text[:i]))[valid].log_softmax(0)
        total += float(row[valid.index(token)])
    return total


def beams(width: int) -> set[Text]:
    """The items a constrained beam search finds."""
    live = {()}
    while any(text not in TEXTS for text in live):
        longer = {item[: len(text) + 1] for text in live for item in TEXTS if item[: len(text)] == text}
        live = set(sorted(longer, key=valid_logp, reverse=True)[:width])
    return live


def searched(cls: type = VED, rule=hashed, **knobs):
    """The chosen text, the items found with their values and log-probabilities, the tokens read, and the notes."""
    lane = scripted("ved", rule, cls, items="|".join(ITEMS), space=False, **knobs)
    done, events = run(lane, {"target": MODEL}, PROMPT, 8)
    [table] = figures(events, "items found, best first")
    found = {row.removesuffix(" (new)"): values for row, values in zip(table["rows"], table["values"])}
    read = sum(event.tokens for event in events if isinstance(event, Forward)) - len(PROMPT)
    return tuple(done.main.written), found, read, [event.text for event in events if isinstance(event, Note)]


def check_beam(cls: type) -> None:
    for width in (1, 2, 3):
        found = searched(cls, width=width, budget=1.0)[1]
        assert {tokens(item) for item in found} == beams(width)
        assert all(abs(values[1] - valid_logp(tokens(item))) < 1e-9 for item, values in found.items())


@pytest.mark.oracle("ved")
def test_with_nothing_left_after_the_first_search_it_is_a_beam_search_over_the_items():
    check_beam(VED)


class WholeVocabulary(VED):
    """Wrong: probabilities among all tokens, not among those that continue an item."""

    def _distribute(self, prefix, raw):
        super()._distribute(prefix, raw)
        prefix.shares = dict(prefix.raw)


@pytest.mark.refuses("ved")
def test_probabilities_among_all_tokens_fail():
    with pytest.raises(AssertionError):
        check_beam(WholeVocabulary)


def check_best(cls: type) -> None:
    chosen, found, _, _ = searched(cls, gate=False, budget=16.0)
    assert {tokens(item) for item in found} == set(TEXTS)
    assert chosen == max(TEXTS, key=lambda text: hashed((*PROMPT, *text)))


@pytest.mark.oracle("ved")
def test_a_budget_for_the_whole_trie_finds_the_item_of_the_highest_value():
    check_best(VED)


class ValuesOfTheParents(VED):
    """Wrong: a prefix has the value of the one before it, as in the released code."""

    def _rewarded(self, lm, prefix):
        return super()._rewarded(lm, prefix.parent or prefix)


@pytest.mark.refuses("ved")
def test_giving_children_the_value_of_their_parent_fails():
    with pytest.raises(AssertionError):
        check_best(ValuesOfTheParents)


@pytest.mark.parametrize("budget", [1.0, 2.0, 3.5])
def test_no_more_tokens_are_read_than_the_budget_allows_and_every_item_is_complete(budget):
    first = searched(budget=1.0)[2]
    for seed_of_rule in range(4):
        chosen, found, read, _ = searched(rule=lambda text, s=seed_of_rule: hashed((s, *text)), budget=budget)
        assert read <= budget * first and chosen in TEXTS
        assert {tokens(item) for item in found} <= set(TEXTS)


def test_value_alone_leads_straight_to_a_good_item_of_low_probability():
    """Beam 1 misses it; the value of every prefix on its way is high."""
    goal = min((text for text in TEXTS if len(text) == 4), key=valid_logp)
    assert goal not in beams(1)

    def rule(text: Text) -> float:
        return 0.9 if goal[: len(text) - len(PROMPT)] == text[len(PROMPT):] else 0.1

    knobs = {"width": 1, "entropy_weight": 0.0, "exploration": 0.0, "draws": False}
    assert searched(rule=rule, budget=5.0, **knobs)[0] == goal


def test_entropy_is_that_of_the_valid_tokens():
    prefix = ItemPrefix(0, 0, None, {0: {}, 2: {}})
    raw = torch.tensor([0.2, 0.3], dtype=torch.float64).log()
    make("ved", reward="likelihood")._distribute(prefix, raw)
    assert prefix.entropy == pytest.approx(-(0.4 * math.log(0.4) + 0.6 * math.log(0.6)))


def test_a_catalogue_of_one_item_is_refused():
    with pytest.raises(Refusal, match="two different items"):
        make("ved", items="bread | bread")
