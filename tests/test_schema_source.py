"""A schema is found inside of what chat APIs wrap around it, and a name that is no keyword never passes in silence."""
from __future__ import annotations

import json

import pytest
from pairs import pair
from saved import save_models
from toys import byte_tokenizer

import playground
from playground.cli import main
from playground.contract import find, make
from playground.contract.lane_config import LaneConfig
from playground.decoding.lane_checks import judge
from playground.errors import Refusal
from playground.events import Note
from playground.grammar.matcher import GrammarEngine
from playground.grammar.schema.source import read_schema, understood

ANSWER = {"type": "object", "properties": {"answer": {"enum": [7]}}, "required": ["answer"],
          "additionalProperties": False}
WRAPPED = {
    "schema": {"name": "answer", "strict": True, "schema": ANSWER},
    "json_schema.schema": {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}},
    "response_format.json_schema.schema": {
        "model": "m", "response_format": {"type": "json_schema", "json_schema": {"schema": ANSWER}},
    },
    "text.format.schema": {"text": {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}}},
    "function.parameters": {"type": "function", "function": {"name": "answer", "parameters": ANSWER}},
    "parameters": {"name": "answer", "description": "writes it", "parameters": ANSWER},
    "input_schema": {"name": "answer", "input_schema": ANSWER},
    "extra_body.guided_json": {"extra_body": {"guided_json": ANSWER}, "temperature": 0},
    "structured_outputs.json": {"structured_outputs": {"json": ANSWER}},
    "generationConfig.responseSchema": {"generationConfig": {"responseSchema": ANSWER}},
    "json_schema": {"json_schema": json.dumps(ANSWER)},
}
MISSPELT = {
    "propertys": ("properties", {"type": "object", "propertys": {}}),
    "require": ("required", {"type": "object", "require": ["answer"]}),
    "minlength": ("minLength", {"type": "string", "minlength": 3}),
    "additional_properties": ("additionalProperties", {"type": "object", "additional_properties": False}),
    "any_of": ("anyOf", {"type": "object", "any_of": [{}]}),
    "divisibleBy": ("multipleOf", {"type": "integer", "divisibleBy": 2}),
    "nullable": ("null", {"type": "string", "nullable": True}),
}
KNOWN = [  # what pydantic, zod, OpenAPI, editors and code generators add
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "a", "title": "A", "type": "object"},
    {"type": "object", "x-order": 1, "$comment": "c", "ui:order": ["a"], "examples": [{}], "default": {}},
    {"type": "string", "format": "date", "example": "2024-01-01", "readOnly": True, "deprecated": False},
    {"type": "object", "discriminator": {"propertyName": "kind"}, "xml": {"name": "a"}, "externalDocs": {"url": "u"}},
    {"type": "string", "enum": ["a"], "enumNames": ["A"], "markdownDescription": "**a**", "errorMessage": "no"},
    {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png", "contentSchema": {}},
    {"type": "object", "properties": {"a": {"tsType": "Foo"}, "propertys": {"type": "string"}, "b": {}}},
    {"const": {"propertys": 1, "anything": {"typ": 2}}},
    {"$defs": {"a": {"type": "string", "title": "A"}}, "$ref": "#/$defs/a", "name": "A", "strict": True},
]


def compiled(schema):
    tokenizer = byte_tokenizer(merges=0)
    engine = GrammarEngine(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    return engine.compile(*make("json_schema", source=json.dumps(schema)).grammar())


def texts_of(schema) -> str:
    """What the grammar of a schema forces from the start."""
    matcher = compiled(schema).matcher()
    return byte_tokenizer(merges=0).decode(matcher.forced())


@pytest.mark.strategy("json_schema")
@pytest.mark.parametrize("path", WRAPPED)
def test_a_schema_is_taken_out_of_what_is_around_it_and_a_remark_says_so(path):
    assert understood(WRAPPED[path]).schema == ANSWER
    assert understood(WRAPPED[path]).remarks == [f"The JSON Schema was read from {path}; what is around it is ignored."]
    assert texts_of(WRAPPED[path]) == texts_of(ANSWER) == '{"answer": 7}'


@pytest.mark.parametrize("schema", [ANSWER, *KNOWN], ids=lambda schema: "-".join(schema)[:60])
def test_schemas_as_libraries_write_them_are_read_as_they_are_and_without_a_remark(schema):
    assert understood(schema) == (schema, [])


def test_properties_that_are_called_like_a_wrapper_are_not_one():
    named = {"type": "object", "properties": {"schema": ANSWER, "parameters": ANSWER}}
    assert understood(named).schema == named
    with pytest.raises(Refusal, match='under "properties"'):
        understood({"text": {"type": "string"}, "answer": {"type": "integer"}})


def test_a_response_format_without_a_schema_asks_for_any_object():
    assert understood({"type": "json_object"}).schema == {"type": "object"}
    assert "any object" in understood({"response_format": {"type": "json_object"}}).remarks[0]


def test_a_schema_that_says_nothing_is_remarked_on():
    for empty in ({}, {"title": "Answer"}, {"json_schema": {"name": "a", "schema": {}}}):
        assert understood(empty).remarks[-1] == "The JSON Schema says nothing about a value: any JSON fits it."


def test_a_name_that_a_reference_leads_through_is_known():
    schema = {"components": {"schemas": {"a": {"type": "integer"}}}, "$ref": "#/components/schemas/a"}
    assert not understood(schema).remarks
    assert "'components'" in understood({**schema, "$ref": "#/$defs/a", "$defs": {"a": {}}}).remarks[0]


def test_a_value_that_a_keyword_cannot_have_is_remarked_on_where_the_engine_does_not_read_it():
    """`required` as draft 3 and many hands write it, in the property that is meant."""
    optional = {"type": "object", "properties": {"a": {"type": "integer", "required": True}}}
    (remark,) = understood(optional).remarks
    assert remark.startswith("'required' at #/properties/a has a value that this keyword of JSON Schema cannot have")
    assert not understood({"type": "integer", "minimum": 3, "exclusiveMinimum": True}).remarks  # of draft 4, and read


@pytest.mark.parametrize("name", MISSPELT)
def test_a_name_that_is_no_keyword_is_remarked_on_with_the_keyword_that_is_probably_meant(name):
    meant, schema = MISSPELT[name]
    (remark,) = understood(schema).remarks
    assert repr(name) in remark and meant in remark and "is ignored" in remark
    (nested,) = understood({"type": "object", "properties": {"a/b": schema}}).remarks
    assert "#/properties/a~1b" in nested


@pytest.mark.parametrize(
    "schema, says",
    [
        ({"answer": {"type": "integer"}}, 'listed under "properties"'),
        ({"name": {"type": "string"}, "label": {"type": "string"}}, "only 'name', 'label'"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "answer": {}}, "only 'answer'"),
        ({"propertys": {"answer": {}}}, "Write properties for 'propertys'"),
        ({"type": "object", "properties": {"answer": {"typ": "integer"}}}, "at #/properties/answer .* Write type"),
        ({"type": "object", "$defs": {"a": {"enums": [1]}}}, "at #/\\$defs/a .* Write enum"),
        ([ANSWER], "an object in braces"),
        ([{"type": "function", "function": {"name": "f"}}], "for tool_calls"),
    ],
)
def test_an_object_without_any_keyword_is_refused(schema, says):
    with pytest.raises(Refusal, match=says) as refused:
        compiled(schema)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name, meant", [("objec", "object"), ("INTEGER", "integer"), ("str", "string")])
def test_a_type_that_is_none_is_refused_with_the_one_that_is_probably_meant(name, meant):
    with pytest.raises(Refusal, match=f"Invalid type: {name}. Write {meant}"):
        compiled({"type": name})


def test_many_unknown_names_are_counted_and_compared_in_a_bounded_time():
    named = {f"p{i}": {"type": "string", "q" * 5000: i} for i in range(900)}
    many = understood({"type": "object", "properties": named})
    assert len(many.remarks) == 5 and many.remarks[-1].startswith("896 more names")
    deep = read_schema('{"items": ' * 400 + "{}" + "}" * 400)
    assert deep.remarks == []


CHECKED = {"type": "object", "propertys": {}, "maxProperties": 0}
SAYING = {
    "json_schema": {"source": json.dumps(CHECKED)},
    "checked_schema": {"source": json.dumps(CHECKED)},
    "triggered": {"source": json.dumps(CHECKED), "format": "json_schema", "trigger": "#"},
    "structural_tags": {"source": json.dumps([{"begin": "<a>", "schema": CHECKED, "end": "</a>"}])},
    "tool_calls": {"tools": json.dumps([{"name": "f", "parameters": CHECKED}]), "place": "whole answer"},
}


@pytest.mark.strategy("json_schema", "checked_schema", "triggered", "structural_tags", "tool_calls")
@pytest.mark.parametrize("name", SAYING)
def test_remarks_reach_the_lane_editor_and_the_trace_wherever_a_schema_is_taken(name):
    lane = LaneConfig("greedy", {}, [(name, SAYING[name])])
    (verdict,) = judge([lane])
    assert verdict["problem"] == "" and "'propertys' at # is no keyword" in verdict["remarks"][0]
    result = playground.run("greedy", "The bird", models=pair(), max_new_tokens=4, extras=[(name, SAYING[name])])
    notes = [stamped.event.text for stamped in result.trace.events if isinstance(stamped.event, Note)]
    assert notes == verdict["remarks"]


@pytest.mark.strategy("json_schema")
def test_remarks_are_printed_in_the_shell_beside_the_text(tmp_path, capsys):
    source = tmp_path / "schema.json"
    source.write_text(json.dumps({"name": "answer", "schema": ANSWER}))
    model = save_models(tmp_path).target
    asked = ["run", "greedy", "--model", model, "--prompt", "The bird", "--with", f"json_schema:file={source}"]
    assert main([*asked, "--max-new-tokens", "20"]) == 0
    shown = capsys.readouterr()
    assert "read from schema; what is around it is ignored." in shown.err and '{"answer": 7}' in shown.out


@pytest.mark.strategy("tool_calls")
@pytest.mark.parametrize("key", ["parameters", "input_schema", "inputSchema"])
def test_the_parameters_of_a_tool_are_found_under_the_names_of_several_apis(key):
    tools = find("tool_calls")(json.dumps({"tools": [{"name": "f", key: ANSWER}]}), place="whole answer")
    arguments = json.loads(tools.grammar()[1])["properties"]["arguments"]
    assert arguments == ANSWER
    with pytest.raises(Refusal, match="The tool 'f': .* enforces nothing"):
        find("tool_calls")(json.dumps([{"name": "f", key: {"city": {"type": "string"}}}])).grammar()
