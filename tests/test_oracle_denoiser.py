"""The oracle: exact marginals of a table of strings, the bundled sentences, and loading them."""
from __future__ import annotations

import json
import math

import pytest
import torch
from tables import Letters

import playground
from playground.engine.canvas.table_denoiser import OracleDenoiser
from playground.engine.checkpoint import catalogue
from playground.engine.loading.load import Loading
from playground.engine.loading.load import load as load_network
from playground.errors import Refusal
from support.denoiser_lanes import ORACLE, ORDERS, answer, conditional, over, passes, random_table, recorded

SENTENCES = {
    sentence["text"] for sentence in json.loads(catalogue.ORACLE_SENTENCES.read_text(encoding="utf-8"))["sentences"]
}


# --- the oracle ---

def test_the_oracles_marginals_are_those_of_the_consistent_strings():
    table = random_table(3, 4)
    model = over(table)
    for revealed in ({}, {0: 1}, {1: 2, 3: 0}, {0: 0, 1: 1, 2: 2}):
        rows = model.denoise([revealed.get(i) for i in range(4)]).exp()
        for position in set(range(4)) - set(revealed):
            assert rows[position].tolist() == pytest.approx(conditional(table, revealed, position))
        for position, token in revealed.items():
            assert float(rows[position, token]) == pytest.approx(1.0)


def test_without_a_consistent_string_those_with_most_agreeing_tokens_count():
    model = OracleDenoiser.from_texts(["red fox runs", "red fox hides", "green frog hides"], [1.0, 2.0, 3.0])
    red, fox, runs, green, frog, hides, end = model.tokens.encode("red fox runs green frog hides") + list(model.end_ids)
    rows = model.denoise([green, fox, None, None]).exp()  # each of the three agrees with one of the two
    assert [float(rows[2, token]) for token in (runs, hides)] == pytest.approx([1 / 6, 5 / 6]) and float(
        rows[3, end]
    ) == 1
    rows = model.denoise([red, frog, runs, None]).exp()  # only the first agrees with two
    assert float(rows[0, red]) == float(rows[1, fox]) == float(rows[2, runs]) == 1


def test_sentences_are_padded_to_one_length_without_changing_their_text():
    for string in ORACLE.strings.tolist():
        assert ORACLE.tokens.decode(string).strip() in SENTENCES
        assert string[-1] in ORACLE.end_ids
    assert ORACLE.p.sum() == pytest.approx(1.0) and len(SENTENCES) == ORACLE.parameters == 60


def test_sentences_are_distinct_and_their_words_are_dependent():
    """Sampled word by word from the marginals, few sentences would be complete."""
    blind = ORACLE.denoise([None] * ORACLE.context)
    chance = sum(math.exp(float(blind[range(ORACLE.context), string].sum())) for string in ORACLE.strings)
    assert len({tuple(string) for string in ORACLE.strings.tolist()}) == 60 and chance < 1e-3


@pytest.mark.parametrize(
    "prompt, advice", [("zebra", "try 'the' or 'one'"), ("The green dog", "try 'the green bird' or")]
)
def test_a_prompt_that_begins_no_sentence_is_refused_with_suggestions(prompt, advice):
    with pytest.raises(Refusal, match=f"No sentence of the oracle begins with .*: {advice}"):
        ORACLE.answer_length(ORACLE.tokens.encode(prompt), 64)


def test_a_prompt_may_have_capitals_and_extra_spaces():
    assert ORACLE.tokens.encode("  The   green BIRD ") == ORACLE.tokens.encode("the green bird")


@pytest.mark.parametrize("weights", [[], [1.0, 0.0]])
def test_every_string_needs_a_weight(weights):
    with pytest.raises(ValueError, match="positive weight"):
        OracleDenoiser(
            torch.zeros(len(weights), 2, dtype=torch.long), torch.tensor(weights), Letters("ab", frozenset())
        )


# --- the bundled sentences ---

def sentence(prompt: str, seed: int, **knobs) -> str:
    return prompt + answer(recorded(ORACLE, ORACLE.tokens.encode(prompt), seed, **knobs))


@pytest.mark.parametrize("order", ORDERS)
def test_filled_one_by_one_every_text_is_a_listed_sentence(order):
    assert {sentence("the", seed, order=order, temperature=1.0) for seed in range(6)} <= SENTENCES


def test_filled_at_once_words_of_several_sentences_mix():
    mixed = {sentence("the", seed, steps=1, temperature=1.0) for seed in range(6)} - SENTENCES
    assert mixed == {sentence("the", seed, steps=1, temperature=1.0) for seed in range(6)}


def test_filling_all_certain_positions_saves_forwards_without_changing_the_distribution():
    for seed in range(6):
        events = recorded(ORACLE, ORACLE.tokens.encode("the"), seed, rule="threshold", threshold=1.0, temperature=1.0)
        assert "the" + answer(events) in SENTENCES and passes(events) <= 8 < ORACLE.context - 1


# --- loading it ---

def test_the_oracle_is_loaded_by_its_name_like_any_model():
    target = playground.load("oracle").target
    assert target.fills and target.revision == ORACLE.revision
    entry = next(entry for entry in catalogue.entries() if entry.name == "oracle")
    assert f"table over {target.parameters} sentences, not a neural network" in entry.note


def test_the_oracle_has_no_draft_and_is_none():
    with pytest.raises(Refusal, match="takes no draft"):
        playground.load("oracle", "pocket-draft")
    with pytest.raises(Refusal, match="table without weights"):
        load_network("oracle", Loading("cpu"))


def test_a_missing_list_of_sentences_is_refused(tmp_path):
    with pytest.raises(Refusal, match="missing from assets"):
        OracleDenoiser.bundled(file=tmp_path / "oracle.json")
