"""ASAp: the distribution of its samples, what its trie learns from them, and what a visitor's next run reuses."""
from __future__ import annotations

from math import exp, log

import pytest
import torch
from pairs import pair
from tables import Law, TableModel, distance

from playground.contract.lane_config import LaneConfig
from playground.decoding.models import Models
from playground.decoding.rng import Draws
from playground.decoding.visitor_memory import Memory
from playground.events import Note
from strategies.constrained.asap.prefix_trie import NEVER, PrefixTrie
from support.asap_trials import (
    COIN,
    END,
    START,
    TOKENIZER,
    Evenly,
    Spelt,
    choosing,
    coins,
    events,
    given_the_grammar,
    ids,
    languages,
    law,
    log_chance,
    one_lane,
    prefixes_of,
    table,
    taught,
    texts,
    trie_of,
    under,
)
from support.laws import EXACT, WRONG

# --- the distribution by hand: texts of a choice, each with the end token the model has to write itself ---

def under_a_mask(model: TableModel, options: list[str]) -> Law:
    """The distribution if every row is renormalised over its allowed tokens."""
    texts, found = [(*ids(option), END) for option in options], {}
    for text in texts:
        p = 1.0
        for i, token in enumerate(text):
            row = model.scores((START, *text[:i])).softmax(-1)
            p *= float(
                row[token]
                / row[sorted({other[i] for other in texts if other[:i] == text[:i] and len(other) > i})].sum()
            )
        found[text] = p
    return found


def chances(model: TableModel, options: list[str]) -> dict[Spelt, float]:
    """Exact probability that unconstrained sampling after a prefix gives an option, summed over the options."""
    texts = [(*ids(option), END) for option in options]
    prefixes = {text[:i] for text in texts for i in range(len(text) + 1)}
    return {
        prefix: sum(
            exp(log_chance(model, text) - log_chance(model, prefix)) for text in texts if text[: len(prefix)] == prefix
        )
        for prefix in prefixes
    }


# --- T1: a fair coin five times; allowed are 00000 and all texts that begin with 1 ---

ZEROS = (*ids("00000"), END)


def visited(first: str) -> Memory:
    """The memory of a visitor whose only sample began with 0, and was 00000, or with 1."""
    memories = (taught(under(COIN, samples=1), coins(), Draws(seed)) for seed in range(20))
    return next(memory for memory in memories if trie_of(memory).tokens[1] == ids(first)[0])


def zeros(memory: Memory | None = None) -> float:
    """Probability that the next sample is 00000."""
    return law(under(COIN, samples=1), coins(), memory)[ZEROS]


def test_the_first_sample_is_drawn_as_under_a_plain_mask():
    assert abs(zeros() - 1 / 2) < EXACT


@pytest.mark.oracle("asap")
def test_one_sample_of_the_rare_text_reveals_its_probability():
    assert abs(zeros(visited("0")) - 1 / 17) < EXACT


def test_a_sample_of_another_text_reveals_nothing_about_the_rare_one():
    assert abs(zeros(visited("1")) - 1 / 2) < EXACT


def test_what_the_trie_learns_from_one_sample():
    trie = trie_of(visited("0"))
    found = {prefix: trie.chances[node] for node, prefix in prefixes_of(trie).items()}
    assert [exp(found[ids("0" * n)]) * 2 ** (5 - n) for n in range(1, 6)] == pytest.approx([1.0] * 5, abs=EXACT)
    assert abs(exp(found[()]) - (1 / 32 + 1 / 2)) < EXACT


def test_the_second_sample_of_a_run_uses_what_the_first_taught():
    found = law(under(("regex", {"pattern": "0{3}|1[01]{2}"}), samples=2), coins(3))
    assert abs(found[*ids("000"), END] - (1 / 2 * 1 / 5 + 1 / 2 * 1 / 2)) < EXACT


class RenormalisesFirst(PrefixTrie):
    def learn(self, node, legal):
        super().learn(node, legal - legal.logsumexp(0))

    def _add(self, token, parent, logp):
        super()._add(token, parent, 0.0 if logp > NEVER else logp)


class StaysWhereItLearned(PrefixTrie):
    def settle(self, node):
        pass


class KnowsOnlyWhatWasDrawn(PrefixTrie):
    def learn(self, node, legal):
        drawn = [*self.children[node]]
        super().learn(node, torch.full_like(legal, NEVER).index_copy(0, torch.tensor(drawn), legal[drawn]))


@pytest.mark.refuses("asap")
@pytest.mark.parametrize(
    "wrong, first, right",
    [(RenormalisesFirst, "0", 1 / 17), (StaysWhereItLearned, "0", 1 / 17), (KnowsOnlyWhatWasDrawn, "1", 1 / 2)],
)
def test_a_trie_that_learns_wrongly_is_detected(wrong, first, right, monkeypatch):
    monkeypatch.setattr("strategies.constrained.asap.PrefixTrie", wrong)
    assert abs(zeros(visited(first)) - right) > WRONG


@pytest.mark.slow
def test_over_many_samples_the_rare_text_has_its_true_frequency():
    notes = [event.text for event in events(under(COIN, samples=100), Models(coins())) if isinstance(event, Note)]
    assert len(notes) == 100 and notes[6].startswith("Sample 7 of 100: ")
    assert 1 <= sum("'00000'" in note for note in notes) <= 14  # 6 on average; a plain mask draws 50


# --- T2, T3: bounds never rise and converge to the exact values, and so does the distribution ---

@pytest.mark.slow
def test_every_estimate_is_an_upper_bound_and_never_rises():
    for seed, options in enumerate(languages()):
        model, memory, before = table(seed), Memory(), {}
        exact = chances(model, options)
        for run in range(15):
            one_lane(choosing(*options, samples=1), model, Draws(run), memory)
            trie = trie_of(memory)
            now = {prefix: exp(trie.chances[node]) for node, prefix in prefixes_of(trie).items()}
            assert all(now[prefix] >= exact[prefix] - EXACT for prefix in now)
            assert all(now[prefix] <= before[prefix] + EXACT for prefix in before)
            before = now
        assert before[()] < 1


@pytest.fixture(scope="module")
def learned() -> list[tuple[TableModel, list[str], Memory]]:
    return [
        (table(seed), options, taught(choosing(*options, samples=80), table(seed), Evenly()))
        for seed, options in enumerate(languages())
    ]


@pytest.mark.slow
def test_estimates_are_exact_once_every_prefix_was_read(learned):
    for model, options, memory in learned:
        trie, exact = trie_of(memory), chances(model, options)
        found = {prefix: exp(trie.chances[node]) for node, prefix in prefixes_of(trie).items()}
        assert found.keys() == exact.keys(), "samples did not reach every prefix"
        assert max(abs(found[prefix] / exact[prefix] - 1) for prefix in exact) < EXACT


@pytest.mark.oracle("asap")
def test_samples_follow_the_model_given_the_grammar_once_every_prefix_was_read(learned):
    for model, options, memory in learned:
        found, right = law(choosing(*options, samples=1), model, memory), given_the_grammar(model, options)
        assert distance(found, right) < EXACT
        assert distance(under_a_mask(model, options), right) > WRONG


@pytest.mark.slow
def test_earlier_samples_are_already_closer_to_it_than_with_a_plain_mask():
    for seed, options in enumerate(languages()):
        model = table(seed)
        drawn = texts(events(choosing(*options, samples=60), Models(model)))[10:]
        frequencies = {(*ids(text), END): drawn.count(text) / len(drawn) for text in set(drawn)}
        right = given_the_grammar(model, options)
        assert divergence(frequencies, right) < divergence(under_a_mask(model, options), right)


def test_the_first_sample_has_the_distribution_of_a_plain_mask():
    for seed, options in enumerate(languages()):
        assert distance(law(choosing(*options, samples=1), table(seed)), under_a_mask(table(seed), options)) < EXACT


def divergence(p: Law, q: Law) -> float:
    return sum(chance * log(chance / q[text]) for text, chance in p.items())


def test_the_target_distribution_includes_the_temperature():
    options, model = languages()[0], table(0)
    memory = taught(choosing(*options, samples=80, temperature=0.6), model, Evenly())
    found = law(choosing(*options, samples=1, temperature=0.6), model, memory)
    assert distance(found, given_the_grammar(model, options, 0.6)) < EXACT
    assert distance(found, given_the_grammar(model, options)) > WRONG


# --- T4: no probability mass is lost ---

def two_letters(context: Spelt) -> torch.Tensor:
    """a, b or the end, with probabilities that depend on the text; the end is certain after two."""
    scores = torch.full((len(TOKENIZER),), NEVER, dtype=torch.float64)
    open_, odds = [*ids("ab"), END], [0.5, 1.2 * len(context), -0.4 * sum(context) % 3]
    scores[open_ if len(context) < 3 else [END]] = torch.tensor(
        odds if len(context) < 3 else [0.0], dtype=torch.float64
    )
    return scores


def test_if_all_tokens_are_allowed_it_is_plain_sampling():
    model = TableModel(tokenizer=TOKENIZER, rule=two_letters)
    everything = {
        (*ids(text), END): exp(log_chance(model, (*ids(text), END))) for text in ["", "a", "b", "aa", "ab", "ba", "bb"]
    }
    anything = under(("regex", {"pattern": "[ab]*"}), samples=2)
    assert distance(law(anything, model), everything) < EXACT
    assert all(abs(chance) < EXACT for chance in trie_of(taught(anything, model, Draws(0))).chances)


def test_if_one_text_is_allowed_it_is_always_written():
    assert law(choosing("abc", samples=3), table(0)) == {(*ids("abc"), END): 1.0}


@pytest.mark.parametrize("seed", range(5))
def test_one_sample_equals_a_plain_mask_with_the_same_random_numbers(seed):
    grammar = ("regex", {"pattern": "[a-f]{2,5}|x[0-9]+y"})
    for model in (pair().target, table(seed)):
        masked, ours = (one_lane(config, model, Draws(seed), length=20) for config in (
            LaneConfig("sample", {"temperature": 1.0, "top_p": 1.0}, [grammar]), under(grammar, samples=1)))
        assert ours.text == masked.text != ""
