"""Names of special tokens in settings: as stop strings, in words and phrases, and where only text is compared."""
from __future__ import annotations

import json

import pytest
from toys import ASSISTANT, USER, byte_tokenizer

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.model import Model
from playground.events import Failed
from playground.trace.result import Result
from support.scripted_models import writes

TOKENIZER = byte_tokenizer()
A, B, C, D = (TOKENIZER.encode(letter)[0] for letter in "ABCD")
NAMED = TOKENIZER.encode(ASSISTANT)[0]


@pytest.fixture(scope="module")
def model() -> Model:
    """It writes A, B, the special token <|assistant|>, C, D, D, ..."""
    return writes([A, B, NAMED, C, D])


def result(model: Model, *extras, strategy: str = "greedy", stop: tuple[str, ...] = ()) -> Result:
    session = prepare(Models(model), [LaneConfig(strategy, {}, list(extras))], Prompt("A"), Limits(0, 5, stop))
    for _ in session:
        pass
    return Result(session.trace.lane(0))


def test_the_plain_text_goes_on_after_the_special_token(model):
    assert result(model).token_ids == [B, NAMED, C, D, D]


@pytest.mark.parametrize(("stop", "last"), [(ASSISTANT, NAMED), ("B" + ASSISTANT, NAMED), (ASSISTANT + "C", C)])
def test_a_stop_string_with_the_name_of_a_special_token_ends_the_text_at_the_token(model, stop, last):
    stopped = result(model, stop=(stop,))
    assert (stopped.reason, stopped.token_ids[-1]) == ("stop_string", last)


def test_a_stop_string_that_is_only_a_part_of_a_name_does_not_match_it(model):
    assert result(model, stop=("assistant", USER)).reason == "length"


@pytest.mark.parametrize(
    "toggle",
    [("logit_bias", {"biases": f"{ASSISTANT}: -100"}), ("bad_words", {"words": ASSISTANT})],
    ids=lambda toggle: toggle[0],
)
def test_a_special_token_in_a_list_of_words_is_that_token(model, toggle):
    assert NAMED not in result(model, toggle).token_ids


def test_a_bias_is_added_to_a_special_token_once_even_after_a_space():
    space = TOKENIZER.encode(" ")[0]
    favoured = result(writes([A, space, B, C, NAMED]), ("logit_bias", {"biases": f"{ASSISTANT}: 20"}))
    assert favoured.token_ids[:2] == [space, B]


@pytest.mark.parametrize(
    ("constraint", "knobs"),
    [
        ("triggered", {"trigger": ASSISTANT}),
        ("triggered", {"end": f"end{ASSISTANT}"}),
        ("structural_tags", {"source": json.dumps([{"begin": "<a>", "end": ASSISTANT, "regex": "b"}])}),
        ("tool_calls", {"begin_tag": ASSISTANT}),
    ],
)
def test_a_special_token_where_only_text_is_compared_is_refused(model, constraint, knobs):
    last = list(prepare(Models(model), [LaneConfig("greedy", {}, [(constraint, knobs)])], Prompt("A"), Limits()))[-1]
    assert isinstance(last.event, Failed) and f"{ASSISTANT} is a special token" in last.event.message
