"""Tool calls: the texts that the masks allow, against the tools' schemas checked by jsonschema."""
from __future__ import annotations

import json

import jsonschema
import pytest
from toys import byte_tokenizer

from playground.contract import Constraint, find, make
from playground.engine.grammar_matcher import GrammarEngine
from playground.errors import Refusal
from support.texts_of_masks import engine, texts_of_masks  # noqa: F401

ToolCalls = find("tool_calls")
TOKENIZER = byte_tokenizer(merges=0)
F = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
G = {"type": "object", "properties": {"y": {"enum": ["u"]}, "z": {"type": "boolean"}}, "additionalProperties": False}
TOOLS = [{"name": "f", "parameters": F}, {"type": "function", "function": {"name": "g", "parameters": G}}]
SCHEMAS = {"f": F, "g": G}
ARGUMENTS = [
    {**x, **y, **z}
    for x in ({}, {"x": 1}, {"x": 2}, {"x": 3})
    for y in ({}, {"y": "u"})
    for z in ({}, {"z": True}, {"z": False})
]
CALLS = [{"name": name, "arguments": arguments} for name in ("f", "g", "h") for arguments in ARGUMENTS]


def valid(call: dict) -> bool:
    schema = SCHEMAS.get(call["name"])
    return schema is not None and jsonschema.Draft202012Validator(schema).is_valid(call["arguments"])


def answers(constraint: Constraint, engine: GrammarEngine) -> set[str]:  # noqa: F811
    """Every whole answer that the masks lead to."""
    letters = "".join(sorted(set("".join(map(json.dumps, CALLS)))))
    return texts_of_masks(engine.compile(*constraint.grammar()).matcher(), letters, 60)


def check(cls: type[Constraint], engine: GrammarEngine) -> None:  # noqa: F811
    found = answers(cls(tools=json.dumps(TOOLS), place="whole answer"), engine)
    assert found == {json.dumps(call) for call in CALLS if valid(call)}


@pytest.mark.oracle("tool_calls")
def test_the_answers_are_the_calls_that_are_valid_under_the_schema_of_their_tool(engine):  # noqa: F811
    check(ToolCalls, engine)


class AnySchemaForAnyTool(ToolCalls):
    """Wrong: the arguments of a call may be those of another tool."""

    def _call(self, name, parameters):
        return super()._call(name, {"anyOf": list(self._tools().values())})


class AnyName(ToolCalls):
    """Wrong: a call may name a tool that does not exist."""

    def _call(self, name, parameters):
        schema = super()._call(name, parameters)
        schema["properties"]["name"] = {"enum": ["f", "g", "h"]}
        return schema


@pytest.mark.refuses("tool_calls")
@pytest.mark.parametrize("wrong", [AnySchemaForAnyTool, AnyName])
def test_arguments_of_another_tool_and_unknown_tools_fail(wrong, engine):  # noqa: F811
    with pytest.raises(AssertionError):
        check(wrong, engine)


def ends_there(constraint: Constraint, text: str, engine: GrammarEngine) -> bool:  # noqa: F811
    """Whether a text may be written and may end."""
    matcher = engine.compile(*constraint.grammar()).matcher()
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return all(matcher.advance(token) for token in tokens) and matcher.accepting


@pytest.mark.oracle("tool_calls")
def test_within_free_text_every_call_has_to_be_valid_and_any_number_may_come(engine):  # noqa: F811
    constraint = ToolCalls(tools=json.dumps(TOOLS))
    for call in CALLS:
        text = f"Let me see. <tool_call>{json.dumps(call)}</tool_call> So."
        assert ends_there(constraint, text, engine) == valid(call), text
    good = f"<tool_call>{json.dumps(next(filter(valid, CALLS)))}</tool_call>"
    assert ends_there(constraint, f"{good} and {good}", engine) and ends_there(constraint, "none", engine)
    assert not ends_there(ToolCalls(tools=json.dumps(TOOLS), must=True), "none", engine)


SOUND = {
    "tool_calls": [
        (
            {"tools": json.dumps(TOOLS), "place": "whole answer"},
            lambda text: valid(json.loads(text)),
        )
    ]
}


@pytest.mark.parametrize("tools, said", [
    ("{", "not valid JSON"),
    ("[]", "no tool"),
    ('[{"parameters": {}}]', "no name"),
    ('[{"name": "f"}, {"name": "f"}]', "Two tools"),
    ('[{"name": "f", "parameters": {"$ref": "#/x"}}]', r"\$ref"),
])
def test_unusable_tools_are_refused(tools, said):
    with pytest.raises(Refusal, match=said):
        make("tool_calls", tools=tools).grammar()
