"""Tool calls: the texts that the masks allow, against the tools' schemas checked by jsonschema."""
from __future__ import annotations

import json
from types import SimpleNamespace

import jsonschema
import pytest
from toys import byte_tokenizer

from playground.contract import Constraint, find, make
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.grammar.matcher import GrammarEngine
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

    def _call(self, name, parameters, keys):
        return super()._call(name, {"anyOf": list(self._tools().values())}, keys)


class AnyName(ToolCalls):
    """Wrong: a call may name a tool that does not exist."""

    def _call(self, name, parameters, keys):
        schema = super()._call(name, parameters, keys)
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


# --- the forms of chat templates ---

TURNS = """{% if tools %}TOOLS {% for t in tools %}{{ t.function | tojson }}{% endfor %}
{% endif %}{% for m in messages %}<{{ m.role }}>CALLED{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
CALLED = "{{ m.content or '' }}{% for call in m.tool_calls or [] %}WRITTEN{% endfor %}"
JSON_CALL = '{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}'
HERMES = "\n<tool_call>\n" + JSON_CALL.replace("KEY", "arguments") + "\n</tool_call>"
LLAMA = JSON_CALL.replace("KEY", "parameters")
NAMED = "<function={{ call.function.name }}>{{ call.function.arguments | tojson }}</function>"
REVERSED = '[{"args": {{ call.function.arguments | tojson }}, "tool": "{{ call.function.name }}"}]'
XML = "<function={{ call.function.name }}><parameter=x>{{ call.function.arguments.x }}</parameter></function>"
F_CALLS = {  # calls of f as each template writes them: with valid and invalid arguments
    "hermes": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"x": %s}}\n</tool_call>'),
    "llama": (LLAMA, '{"name": "f", "parameters": {"x": %s}}'),
    "named": (NAMED, '<function=f>{"x": %s}</function>'),
    "reversed": (REVERSED, '[{"args": {"x": %s}, "tool": "f"}]'),
}


def model_with(written: str, tools: bool = True) -> SimpleNamespace:
    """A model whose chat template writes calls so."""
    template = TURNS.replace("CALLED", CALLED.replace("WRITTEN", written))
    tokenizer = byte_tokenizer(merges=0, template=template if tools else template.replace("TOOLS", "{% if no %}", 1))
    return SimpleNamespace(tokens=Tokens(tokenizer, len(tokenizer)), tokenizer=tokenizer)


def check_template(cls: type[Constraint], engine: GrammarEngine, form: str) -> None:  # noqa: F811
    written, call = F_CALLS[form]
    constraint = cls(tools=json.dumps(TOOLS), place="chat template")
    constraint.check_target(model_with(written))
    for argument, good in (("1", True), ("2", True), ("3", False), ("true", False)):
        assert ends_there(constraint, call % argument, engine) == good, (form, argument)
    assert not ends_there(constraint, (call % "1").replace("f", "h", 1) if form == "llama" else call[:-1], engine)


class KeepsTheDefaultTags(ToolCalls):
    """Wrong: the tags and keys of Hermes, whatever the template writes."""

    def check_target(self, model):
        self.place = "between tags"


@pytest.mark.oracle("tool_calls")
@pytest.mark.parametrize("form", F_CALLS)
def test_calls_have_the_form_of_the_chat_template(engine, form):  # noqa: F811
    check_template(ToolCalls, engine, form)


@pytest.mark.refuses("tool_calls")
@pytest.mark.parametrize("form", ["hermes", "named", "reversed"])
def test_other_tags_than_the_templates_fail(engine, form):  # noqa: F811
    with pytest.raises(AssertionError):
        check_template(KeepsTheDefaultTags, engine, form)


@pytest.mark.strategy("tool_calls")
def test_a_template_whose_form_is_not_recognised_is_refused():
    for written in (XML, ""):
        with pytest.raises(Refusal, match="not recognised"):
            make("tool_calls", place="chat template").check_target(model_with(written))


@pytest.mark.strategy("tool_calls")
def test_the_chat_template_describes_the_tools_in_the_prompt_of_the_lane():
    described = json.loads(make("tool_calls", tools=json.dumps(TOOLS), describe=True).tools_to_describe())
    assert [tool["function"]["name"] for tool in described] == ["f", "g"]
    model = model_with(HERMES)
    text = model.tokens.decode(model.tokens.encode_chat("Hi.", tools=json.dumps(described)))
    assert text.startswith('TOOLS {"description": "", "name": "f"') and text.endswith("<assistant>")
    assert not make("tool_calls").tools_to_describe()
    with pytest.raises(Refusal, match="no place for tools"):
        model_with(HERMES.replace("call.function", "call"), tools=False).tokens.encode_chat("Hi.", tools="[{}]")


@pytest.mark.strategy("tool_calls")
def test_a_complete_call_is_shown_with_its_arguments():
    constraint = ToolCalls(tools=json.dumps(TOOLS))
    text = b'so <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    constraint.begin(0, lambda token: bytes([token]))
    events = [event for end, token in enumerate(text) for event in constraint.explain([*text[:end]], token)]
    assert [event.text for event in events] == ['Call of the tool f with {"x": 1}.']


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
