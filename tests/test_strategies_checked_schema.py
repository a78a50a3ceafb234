"""A checked schema allows exactly the documents that jsonschema validates; on prefixes its verdicts are never wrong."""
from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product

import jsonschema
import pytest
from pairs import pair

from playground.algorithms.constrained.partial_json import UNFINISHED, Open, read_partial
from playground.algorithms.constrained.schema_verdict import SchemaJudge
from playground.contract import Constraint, find
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Commit, Failed
from playground.grammar.matcher import GrammarEngine
from support.languages import byte_engine, language  # noqa: F401 - a fixture

CheckedSchema = find("checked_schema")
ABSENT = object()

DISTINCT = {"type": "array", "items": {"enum": [1, True, "a", None]}, "uniqueItems": True, "maxItems": 3}
RECORD = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, 12]}, "b": {"enum": ["x", "y", [1], [1, 1]]}},
    "additionalProperties": False,
}
PAIRS = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 12}, "minItems": 1, "maxItems": 2}
RECORDS = {
    "not": RECORD | {"not": {"required": ["a", "b"]}},
    "not a value": RECORD | {"not": {"properties": {"a": {"const": 2}}, "required": ["a"]}},
    "if then else": RECORD | {
        "if": {"properties": {"a": {"maximum": 1}}, "required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"not": {"required": ["b"]}},
    },
    "one of": RECORD | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "within": RECORD | {"properties": {
        "a": {"enum": [1, 2, 12], "not": {"multipleOf": 2}},
        "b": {"enum": ["x", "y", [1], [1, 1]], "oneOf": [{"type": "array", "uniqueItems": True}, {"const": "y"}]},
    }},
    "a reference": RECORD | {
        "$defs": {"both": {"required": ["a", "b"]}},
        "not": {"$ref": "#/$defs/both"},
        "anyOf": [{"required": ["a"]}, {"properties": {"b": {"not": {"const": "x"}}}}],
    },
}
OVERLAPPING = PAIRS | {"items": {"oneOf": [{"type": "integer", "minimum": 1, "maximum": 4},
                                           {"type": "integer", "minimum": 3, "maximum": 6}]}}


def fits(schema: dict, document) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(document)


def records() -> Iterable[dict]:
    for values in product([ABSENT, 1, 2, 12, 3], [ABSENT, "x", "y", [1], [1, 1], 1]):
        yield {key: value for key, value in zip("ab", values) if value is not ABSENT}


def lists(values: list, longest: int) -> Iterable[list]:
    for length in range(longest + 1):
        yield from map(list, product(values, repeat=length))


CASES = [
    *((schema, list(records())) for schema in RECORDS.values()),
    (DISTINCT, list(lists([1, True, "a", None], 3))),
    (PAIRS | {"uniqueItems": True}, list(lists(list(range(14)), 2))),
    (OVERLAPPING, list(lists(list(range(8)), 2))),
]


def check_checked_schema(cls: type[Constraint], engine: GrammarEngine, schema: dict, documents: list) -> None:
    assert language(engine, cls(json.dumps(schema))) == {json.dumps(each) for each in documents if fits(schema, each)}


class ChecksNothing(CheckedSchema):
    """The relaxed schema alone."""

    def narrow(self, masks, histories):
        return masks

    def permits(self, history, token, vocabulary):
        return True


class RefusesWhatIsOpen(CheckedSchema):
    """Takes "not yet" for "no"."""

    def _verdict(self, text):
        return super()._verdict(text) is True


class AnyOfTheAlternatives(CheckedSchema):
    def _schema(self):
        return json.loads(self.source.replace("oneOf", "anyOf"))


class TakesTrueForOne(CheckedSchema):
    """Compares items as Python does, to which 1 and True are equal."""

    def _verdict(self, text):
        value = read_partial(text.decode())
        items = [item for item in getattr(value, "value", value if text else []) if item is not UNFINISHED]
        distinct = all(items[i] != items[j] for i in range(len(items)) for j in range(i))
        return super()._verdict(text) if distinct else False


WRONG = {ChecksNothing: 0, RefusesWhatIsOpen: 0, AnyOfTheAlternatives: 3, TakesTrueForOne: len(RECORDS)}


@pytest.mark.oracle("checked_schema")
@pytest.mark.parametrize("case", range(len(CASES)), ids=[*RECORDS, "unique", "unique numbers", "overlapping oneOf"])
def test_the_documents_are_those_that_jsonschema_validates(byte_engine, case):
    check_checked_schema(CheckedSchema, byte_engine, *CASES[case])


@pytest.mark.refuses("checked_schema")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_check_is_refused(byte_engine, wrong):
    with pytest.raises((AssertionError, Refusal)):
        check_checked_schema(wrong, byte_engine, *CASES[WRONG[wrong]])


@pytest.mark.oracle("checked_schema")
@pytest.mark.parametrize("case", range(len(CASES)))
def test_no_verdict_on_a_prefix_is_taken_back(case):
    schema, documents = CASES[case]
    judge = SchemaJudge(schema)
    for document in documents:
        text, valid = json.dumps(document), fits(schema, document)
        assert judge.judge(read_partial(text)) is valid
        verdicts = [judge.judge(read_partial(text[:end])) for end in range(1, len(text))]
        assert (False if valid else True) not in verdicts


@pytest.mark.strategy("checked_schema")
def test_the_beginning_of_a_document_is_read_as_far_as_it_is_certain():
    assert read_partial('{"a": [1, 12') == Open({"a": Open([1, UNFINISHED])})
    assert read_partial('[true, "x\\"') == Open([True, UNFINISHED])
    assert read_partial('{"a": "b", "c') == Open({"a": "b"})
    assert read_partial('{"a": "b", "c"') == Open({"a": "b", "c": UNFINISHED})
    assert read_partial('[[], {}, 1.5e1, nul') == Open([[], {}, 15.0, UNFINISHED])
    assert read_partial("") is UNFINISHED


DEAD_END = {"type": "array", "items": {"enum": list(range(9))}, "minItems": 10, "maxItems": 10, "uniqueItems": True}


@pytest.mark.strategy("checked_schema")
def test_a_dead_end_too_far_ahead_ends_in_a_message_with_the_keyword_and_not_in_a_document():
    lane = LaneConfig("greedy", {}, [("checked_schema", {"source": json.dumps(DEAD_END)})])
    recorded = [stamped.event for stamped in prepare(pair(), [lane], Prompt("The bird is"), Limits())]
    assert isinstance(recorded[-1], Failed) and "allows no token" in recorded[-1].message
    assert "Whatever follows breaks uniqueItems" in recorded[-1].message
    assert not "".join(event.text for event in recorded if isinstance(event, Commit)).endswith("]")


# no text comes to a point where no token is left
BOTH = {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3, "not": {"maxItems": 1}}
SOUND = {"checked_schema": [({"source": json.dumps(BOTH)}, lambda text: fits(BOTH, json.loads(text)))]}


@pytest.mark.strategy("checked_schema")
@pytest.mark.parametrize(
    "schema, says",
    [
        ({"type": "string"}, "ends with a bracket"),
        ([1], "an object in braces"),
        ({"type": "object", "not": {"properties": {"a": {"pattern": "b"}}}}, "pattern within not cannot be checked"),
        ({"type": "object", "oneOf": [{"format": "date"}]}, "format within oneOf cannot be checked"),
        ({"type": "object", "oneOf": [True], "anyOf": [True]}, "put one of them into allOf"),
        ({"type": "object", "anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"format": "date"}}}, "format within any"),
        ({"type": "object", "not": {"$ref": "#/$defs/a"}}, "leads nowhere"),
        ({"type": "object", "not": {"$ref": "http://example.com"}}, "value of \\$ref"),
        ({"type": "object", "not": {"required": 5}}, "value of required"),
        ({"type": "object", "not": 5}, "value of not"),
        ({"type": "array", "items": [{}]}, "value of items"),
        ({"type": "array", "contains": {"pattern": "b"}}, "pattern within contains cannot be checked"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ],
)
def test_what_cannot_be_guaranteed_is_refused_in_one_line(byte_engine, schema, says):
    with pytest.raises(Refusal, match=says) as refused:
        byte_engine.compile(*CheckedSchema(json.dumps(schema)).grammar())
    assert "\n" not in str(refused.value)


@pytest.mark.strategy("checked_schema")
def test_a_schema_that_grows_without_end_while_it_is_read_is_refused():
    definitions = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    judge = SchemaJudge({"type": "object", "$defs": definitions | {"d30": {}}, "not": {"$ref": "#/$defs/d0"}})
    judge.check()
    with pytest.raises(Refusal, match="too large"):
        judge.judge({})
