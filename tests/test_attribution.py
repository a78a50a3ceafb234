"""Attribution to the prompt: each effect is a difference of two log-probabilities, measured by leaving a word out."""

import pytest
import torch
from tables import TableModel

from playground.decoding import attribution
from playground.decoding.attribution import attribute
from playground.errors import Refusal

LETTERS = "abcd |"
PROMPT, ANSWER = "|ab cd a", "bd"


def additive(context: tuple[int, ...]) -> torch.Tensor:
    """Scores that depend on every token of the context, and on its order."""
    scores = torch.zeros(len(LETTERS))
    for place, token in enumerate(reversed(context)):
        scores[(token * 3 + place) % len(LETTERS)] += 1.0 / (1 + place)
    return scores


@pytest.fixture
def model() -> TableModel:
    return TableModel(LETTERS, ends="|", rule=additive)


def ids(model: TableModel, text: str) -> list[int]:
    return model.tokens.encode(text)


def logprob(text: list[int], chosen: int) -> float:
    return float(additive(tuple(text)).log_softmax(-1)[chosen])


def test_the_effect_of_a_word_is_what_the_token_loses_without_it(model):
    tokens, chosen = ids(model, PROMPT + ANSWER), ids(model, "c")[0]
    found = attribute(model, tokens, len(PROMPT), chosen)
    assert [effect.text for effect in found.effects] == ["ab", " cd", " a"]
    for effect, left in zip(found.effects, ("| cd abd", "|ab abd", "|ab cdbd")):
        expected = logprob(tokens, chosen) - logprob(ids(model, left), chosen)
        assert effect.effect == pytest.approx(expected, abs=1e-3) and abs(expected) > 0.01
    assert found.logprob == pytest.approx(logprob(tokens, chosen), abs=1e-3)


def test_the_answer_and_special_tokens_are_never_left_out(model):
    found = attribute(model, ids(model, PROMPT + ANSWER), len(PROMPT), 0)
    assert [effect.first for effect in found.effects] == [1, 3, 6]


@pytest.mark.parametrize("words, forwards", [(10, 11), (attribution.MOST_WORDS, attribution.MOST_WORDS + 1), (100, 35)])
def test_the_forwards_are_counted_and_a_long_prompt_is_left_out_in_groups(model, words, forwards):
    tokens = ids(model, " a" * words)
    before = model.forwards
    found = attribute(model, tokens, len(tokens), 0)
    assert found.forwards == forwards == model.forwards - before
    assert "".join(effect.text for effect in found.effects) == " a" * words


def test_all_forwards_together_read_no_more_than_the_limit(model, monkeypatch):
    monkeypatch.setattr(attribution, "MOST_TOKENS", 400)
    tokens = ids(model, " a" * 30)
    found = attribute(model, tokens, len(tokens), 0)
    assert found.forwards * len(tokens) <= 400
    with pytest.raises(Refusal, match="too many for this"):
        attribute(model, ids(model, " a" * 60), 120, 0)


def test_what_has_no_words_or_other_tokens_is_refused(model):
    with pytest.raises(Refusal, match="no words"):
        attribute(model, ids(model, "||"), 2, 0)
    with pytest.raises(Refusal, match="not tokens of"):
        attribute(model, [99], 1, 0)
