"""The texts of a calibration: questions of the small world with their answers, as the model itself writes them."""
from __future__ import annotations

import pytest

import playground
from playground.engine.model import Model
from playground.questions.world.show import items
from playground.training import calibration
from playground.training.calibration import world_texts

TASKS, ROLES = ("context_qa", "arithmetic", "chat"), ("user", "assistant")


@pytest.fixture(scope="module")
def target() -> Model:
    return playground.load(None, playground.NO_DRAFT, dtype="float32").target


def conversations(model: Model) -> set[tuple[int, ...]]:
    """Each conversation with its answer, by the library's own template."""
    found = set()
    for item in [item for task in TASKS for item in items(task, 4, 3)]:
        turns = [*item.before, (item.prompt, item.answer)]
        messages = [{"role": role, "content": text} for turn in turns for role, text in zip(ROLES, turn)]
        whole = model.tokens.tokenizer.apply_chat_template(messages, tokenize=False)
        ids = model.tokens.tokenizer(whole, add_special_tokens=False)["input_ids"]
        assert ids[-1] in model.end_ids
        found.add(tuple(ids[:-1]))
    return found


def check(model: Model) -> None:
    assert {tuple(ids) for ids in world_texts(model, 3, 4, TASKS)} == conversations(model)


def test_an_answer_has_the_tokens_that_it_has_in_a_chat(target):
    check(target)


def test_answers_that_are_encoded_apart_from_the_chat_are_refused(target, monkeypatch):
    """The wrong variant lacks the blank with which an answer begins."""
    def apart(tokens, item):
        return [*tokens.encode_chat(item.prompt, before=item.before), *calibration._plain(tokens, item.answer)]

    monkeypatch.setattr(calibration, "answered", apart)
    with pytest.raises(AssertionError):
        check(target)
