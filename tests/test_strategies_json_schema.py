"""JSON Schema against all texts of its language, and wrong variants against the same check."""
from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product

import jsonschema
import pytest

import playground
from playground.contract import Constraint, find
from playground.grammar.matcher import GrammarEngine
from playground.questions.questions import ask
from support.languages import byte_engine, language  # noqa: F401 - a fixture
from support.wrong_variants import refused

JsonSchema = find("json_schema")
RECORD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 12}, "b": {"enum": ["x", True, 3]}},
    "required": ["a"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
ABSENT = object()


def records() -> Iterable[dict]:
    """Documents of which some are valid records and others are not, with their keys in its order."""
    for values in product([ABSENT, *range(-5, 20), "1", None], [ABSENT, "x", "y", True, False, 3, 4], [ABSENT, 1]):
        yield {key: value for key, value in zip("abc", values) if value is not ABSENT}


def lists() -> Iterable[list]:
    for length in range(4):
        yield from map(list, product([True, False, 1], repeat=length))


def fits(schema: dict, document) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(document)


def check_json_schema(cls: type[Constraint], engine: GrammarEngine) -> None:
    for schema, documents in ((RECORD, records()), (LIST, lists())):
        expected = {json.dumps(document) for document in documents if fits(schema, document)}
        assert language(engine, cls(json.dumps(schema))) == expected


class Rewritten(JsonSchema):
    """Passes a changed schema to the engine."""

    def rewritten(self, schema: dict) -> dict:
        raise NotImplementedError

    def grammar(self):
        self.source = json.dumps(self.rewritten(json.loads(self.source)))
        return super().grammar()


class NothingIsRequired(Rewritten):
    def rewritten(self, schema):
        return schema | {"required": []}


class ExclusiveMaximum(Rewritten):
    def rewritten(self, schema):
        if "properties" in schema:
            number = schema["properties"]["a"]
            number["exclusiveMaximum"] = number.pop("maximum")
        return schema


class OneItemLess(Rewritten):
    def rewritten(self, schema):
        return schema | {"maxItems": schema["maxItems"] - 1} if "maxItems" in schema else schema


@pytest.mark.oracle("json_schema")
def test_a_schema_accepts_exactly_what_jsonschema_validates(byte_engine):
    check_json_schema(JsonSchema, byte_engine)


@pytest.mark.refuses("json_schema")
@pytest.mark.parametrize("wrong", [NothingIsRequired, ExclusiveMaximum, OneItemLess])
def test_a_wrong_json_schema_is_refused(byte_engine, wrong):
    refused(check_json_schema, wrong, byte_engine)


def test_where_the_schema_leaves_one_token_no_forward_runs():
    """Records of the small world: half the forwards, one for each token with a choice."""
    models, counts = playground.load(), {"free": 0, "under the schema": 0, "forced": 0}
    for question in ask("records", 6, 7):
        schema = ("json_schema", {"source": json.dumps(question.meta["schema"])})
        free, under = (
            playground.run("greedy", question.prompt, models=models, chat=True, extras=extras, max_new_tokens=160)
            for extras in ([], [schema])
        )
        forced, numbers = under.metrics["origins"]["forced"], under.metrics
        assert under.text == free.text.strip() and numbers["tokens"] - forced == numbers["target_forwards"] + 1
        counts["free"] += free.metrics["target_forwards"]
        counts["under the schema"] += numbers["target_forwards"]
        counts["forced"] += forced
    assert 2 * counts["under the schema"] <= counts["free"] and counts["forced"] > counts["under the schema"]
