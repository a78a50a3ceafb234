"""What is read, form by form; that the text is that of the longer prompt; and the map of recall against two forwards.
"""
from __future__ import annotations

from collections import deque

import pytest
import torch
from pairs import pair
from recurrent_networks import recurrent
from registry import Collapse

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Commit, Failed, Figure, Note

ReadTwice = find("read_twice")
GREEDY = LaneConfig("greedy")
COLLAPSES = {"read_twice": [Collapse(LaneConfig("read_twice", {"order": "once"}), GREEDY)]}
PASSAGE, QUESTION = "The fox listens. A bird sings", "What sings?"
CLEAN = PASSAGE + "."
WRITTEN = {
    "question first": f"{QUESTION}\n{CLEAN}",
    "repeat": f"{CLEAN}\n{CLEAN}",
    "jrt": f"{QUESTION}\n{CLEAN}\n{CLEAN}",
    "whole prompt": f"{CLEAN}\n{QUESTION}\n{CLEAN}",
    "thrice": f"{QUESTION}\n{CLEAN}\n{CLEAN}\n{CLEAN}",
}


def events_of(config: LaneConfig, prompt: Prompt, models: Models, length: int = 8) -> list:
    session = prepare(models, [config], prompt, Limits(0, length))
    deque(session, maxlen=0)
    return [stamped.event for stamped in session.trace.events]


def tokens(events: list) -> list[int]:
    return [token for event in events if isinstance(event, Commit) for token in event.ids]


def check(cls: type[ReadTwice]) -> None:
    """The forms as they are written, and the text of a lane that is given the longer prompt."""
    for form, text in WRITTEN.items():
        assert cls(order=form).passages(PASSAGE, QUESTION) == {"twice": text}
    assert cls(order="once").passages(PASSAGE, QUESTION) == {}


class WithoutTheQuestion(ReadTwice):
    """Wrong: the question comes at the end only, in every form."""

    def passages(self, passage, question):
        return {name: text.replace(f"{QUESTION}\n", "") for name, text in super().passages(passage, question).items()}


class OnTheSameLine(ReadTwice):
    """Wrong: no line between the copies."""

    def passages(self, passage, question):
        return {name: text.replace("\n", " ") for name, text in super().passages(passage, question).items()}


@pytest.mark.oracle("read_twice")
def test_the_forms_are_those_of_the_paper_and_its_controls():
    check(ReadTwice)


@pytest.mark.refuses("read_twice")
@pytest.mark.parametrize("wrong", [WithoutTheQuestion, OnTheSameLine])
def test_a_form_without_the_question_or_its_lines_fails(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.oracle("read_twice")
@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("chat", [False, True])
def test_the_text_is_that_of_the_longer_prompt(form, chat):
    models = pair()
    prompt = Prompt(QUESTION, chat=chat, context=PASSAGE)
    twice = events_of(LaneConfig("read_twice", {"order": form}), prompt, models)
    given = events_of(GREEDY, Prompt(QUESTION, chat=chat, context=WRITTEN[form]), models)
    assert tokens(twice) == tokens(given) and len(tokens(twice)) == 8
    assert tokens(twice) != tokens(events_of(GREEDY, prompt, models))


@pytest.mark.strategy("read_twice")
def test_a_recurrent_model_reads_twice_as_well():
    network = recurrent("mamba", vocab_size=320, tie_word_embeddings=False, eos_token_id=None)
    model = Model(network, pair().target.tokenizer, "mamba")
    models = Models(model, model)
    twice = events_of(LaneConfig("read_twice"), Prompt(QUESTION, context=PASSAGE), models)
    assert tokens(twice) == tokens(events_of(GREEDY, Prompt(QUESTION, context=WRITTEN["jrt"]), models))


@pytest.mark.strategy("read_twice")
def test_what_is_recalled_is_the_difference_of_two_costs():
    models = pair()
    prompt = Prompt(QUESTION, context=PASSAGE)
    events = events_of(LaneConfig("read_twice"), prompt, models)
    (found,) = [event.data for event in events if isinstance(event, Figure) and event.name.startswith("nats of")]
    first, again, recalled = found["values"]
    assert recalled == pytest.approx([a - b for a, b in zip(first, again)], abs=2e-4)
    ids = Prompt(QUESTION, context=WRITTEN["jrt"]).encode(models.target)
    work = ForwardInput(models.target.new_store(), ids, list(range(-1, len(ids) - 1)))
    (logits,), _ = models.target.forward([work])
    costs = -logits[:-1].log_softmax(1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    pieces = [models.target.tokens.piece(token) for token in ids]
    length = len(models.target.tokens.encode(CLEAN))
    repeated = (at for at in range(len(ids)) if ids[at:at + 8] == ids[at + length + 1:at + length + 9])
    start = next(repeated) + 1  # after a line break
    places = range(start, start + length)
    assert found["columns"] == [pieces[at] for at in places]
    assert first == pytest.approx([float(costs[at - 1]) for at in places], abs=1e-3)
    assert again == pytest.approx([float(costs[at + length]) for at in places], abs=1e-3)
    assert any("second reading" in event.text for event in events if isinstance(event, Note))


@pytest.mark.strategy("read_twice")
def test_copies_are_found_byte_by_byte_wherever_tokens_end():
    from strategies.sampling.read_twice import copies_of
    pieces = [b"a", b" b", b"b", b"\n", b"bb", b"", b"b", b"b"]
    assert copies_of(pieces, b"bb") == [[(2, 1, 2)], [(4, 0, 2)], [(6, 0, 1), (7, 1, 2)]]
    assert copies_of(pieces, b"x") == []


@pytest.mark.strategy("read_twice")
def test_a_passage_ends_in_one_mark_and_without_the_question():
    from strategies.sampling.read_twice import cleaned
    assert cleaned(" Who? It was Ann ", "Who?") == "Who? It was Ann."
    assert cleaned("It was Ann! Who?", " Who?") == "It was Ann!"
    assert cleaned("Who?", "Who?") == "Who?"


@pytest.mark.strategy("read_twice")
def test_a_prompt_that_is_too_long_twice_is_refused_or_limits_the_text():
    models = pair("gpt2")
    room = models.target.context
    with pytest.raises(Refusal, match="shorten it"):
        prepare(models, [LaneConfig("read_twice"), LaneConfig("read_twice")], Prompt("Who?", context="ab" * room),
                Limits(0, 4))
    passage = "7" * (room // 2 - 12)
    events = events_of(LaneConfig("read_twice"), Prompt("Q?", context=passage), models, 500)
    assert not [event for event in events if isinstance(event, Failed)] and 0 < len(tokens(events)) < 40
