"""Several JSON Schemas for one object, by allOf, anyOf and $ref: what they say together is enforced."""
from __future__ import annotations

import json
from itertools import combinations

import jsonschema
import pytest

from playground.contract import make
from playground.errors import Refusal
from playground.grammar.schema import subset
from playground.grammar.schema.shared_names import names_together
from support.byte_grammars import accepts, engine  # noqa: F401 - a fixture

INTEGER = {"type": "integer"}


def record(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties)}


A, B = record(a=INTEGER), record(b=INTEGER)
DEFINITIONS = {"$defs": {"base": A}}
BASE = {"$ref": "#/$defs/base"}
JOINED = {
    "all of two": {"allOf": [A, B]},
    "all of three": {"allOf": [A, {"allOf": [B, {"type": "object"}]}]},
    "a base and more": {**DEFINITIONS, "allOf": [BASE, {"properties": {"b": INTEGER}, "required": ["b"]}]},
    "more beside a base": {**DEFINITIONS, "allOf": [BASE], **B},
    "more beside a reference": {**DEFINITIONS, **BASE, **B},
    "schemas where OpenAPI has them": {
        "components": {"schemas": {"a": A, "a b": {"allOf": [{"$ref": "#/components/schemas/a"}, B]}}},
        "$ref": "#/components/schemas/a%20b",
    },
    "one of several beside a property": {"properties": {"a": INTEGER}, "anyOf": [A, B], "type": "object"},
    "one of the keys": {**record(), "properties": {"a": INTEGER, "b": INTEGER},
                        "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "alternatives in a part": {"allOf": [A, {"anyOf": [B, record(c=INTEGER)]}]},
    "other keys of a kind": {"allOf": [A, {**B, "additionalProperties": INTEGER}]},
    "further down": {"type": "object", "properties": {"a": {"allOf": [A, B]}}},
}
VALUES = {"a": (1, "x"), "b": (2,), "c": (3, "y")}
OBJECTS = [
    {name: VALUES[name][(number >> at) % len(VALUES[name])] for at, name in enumerate(names)}
    for count in range(4) for names in combinations("abc", count) for number in range(1 << count)
]


def texts(schema: dict) -> list[str]:
    inner = [{"a": each} for each in OBJECTS] if "a" in schema.get("properties", {}) and "allOf" not in schema else []
    return list(dict.fromkeys(json.dumps(each) for each in [*OBJECTS, *inner]))


@pytest.mark.strategy("json_schema")
@pytest.mark.parametrize("schema", JOINED.values(), ids=JOINED)
def test_what_joined_schemas_say_together_is_enforced(engine, schema):  # noqa: F811
    """The oracle is an independent validator. Keys of all texts are in one order."""
    constraint = make("json_schema", source=json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema)
    found = {text: accepts(engine, constraint, text) for text in texts(schema)}
    assert found == {text: validator.is_valid(json.loads(text)) for text in found}
    assert set(found.values()) == {True, False}


@pytest.mark.refuses("json_schema")
@pytest.mark.parametrize("together, patterns", [(names_together, 1), (lambda schema: {}, 2)], ids=["joined", "alone"])
def test_patterns_of_other_keys_can_be_joined_if_they_leave_out_the_same_names(monkeypatch, together, patterns):
    monkeypatch.setattr(subset, "names_together", together)
    both = subset.enforceable(JOINED["all of two"])["allOf"]
    assert len({pattern for each in both for pattern in each["patternProperties"]}) == patterns


def test_alternatives_that_never_hold_together_keep_their_own_names():
    schema = {"anyOf": [A, B]}
    names = names_together(schema)
    assert names[id(A)] == ["a"] and names[id(B)] == ["b"]


def test_joined_schemas_that_allow_nothing_are_refused(engine):  # noqa: F811
    closed = {**A, "additionalProperties": False}
    with pytest.raises(Refusal, match="cannot be used"):
        accepts(engine, make("json_schema", source=json.dumps({"allOf": [closed, B]})), "")
