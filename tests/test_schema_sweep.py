"""A sweep over schemas: keywords, nestings and references. Every finished text is valid, and no lane is trapped.

The judge is the jsonschema library; the texts are written under uniform random logits.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import jsonschema
import pytest
import torch
from toys import byte_tokenizer

from playground.contract import Constraint, find, make
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.grammar.matcher import GrammarEngine

TOKENIZER = byte_tokenizer(merges=0)
END = TOKENIZER.eos_token_id
TOKENS = Tokens(TOKENIZER, len(TOKENIZER))
SPELLED = [b"" if token == END else TOKENS.bytes(token) for token in range(len(TOKENIZER))]
MOST = 160  # bytes before the writer only closes what is open
TRIES = 3

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
LETTERS = {"enum": ["a", "b", "c", "d"]}
LEAVES = {
    "integer": DIGIT, "number": {"type": "number", "minimum": 0, "maximum": 2}, "even": DIGIT | {"multipleOf": 2},
    "text": {"type": "string", "maxLength": 3}, "pattern": {"type": "string", "pattern": "^[ab]{1,2}$"},
    "date": {"type": "string", "format": "date"}, "enum": {"enum": [1, "one", None, [1]]}, "const": {"const": {"k": 1}},
    "type list": {"type": ["boolean", "null"]}, "any of": {"anyOf": [DIGIT, {"type": "null"}]},
    "all of": {"allOf": [DIGIT, {"minimum": 4}]},
}


def closed(properties: dict, **more) -> dict:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


NESTS = {
    "alone": lambda leaf: leaf,
    "in an array": lambda leaf: {"type": "array", "items": leaf, "minItems": 1, "maxItems": 2},
    "first in an array": lambda leaf: {"type": "array", "prefixItems": [leaf], "items": False, "minItems": 1},
    "required": lambda leaf: closed({"a": leaf, "ab": leaf}, required=["ab"]),
    "optional": lambda leaf: closed({"a": leaf, "b": DIGIT}, required=["b"]),
    "beside others": lambda leaf: {
        "type": "object", "properties": {"a": leaf, "b": DIGIT}, "additionalProperties": DIGIT},
    "by a pattern": lambda leaf: {"type": "object", "patternProperties": {"^x$": leaf}, "additionalProperties": False},
    "by reference": lambda leaf: {"$ref": "#/$defs/leaf", "$defs": {"leaf": leaf}},
    "in a tree": lambda leaf: closed({"v": leaf, "next": {"$ref": "#"}}, required=["v"]),
    "in a list that ends": lambda leaf: closed(
        {"v": leaf, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, required=["v", "next"]),
    "beside what never ends": lambda leaf: closed(
        {"v": leaf, "dead": {"$ref": "#/$defs/dead"}}, required=["v"]) | {
            "$defs": {"dead": closed({"n": {"$ref": "#/$defs/dead"}}, required=["n"])}},
}
MASKED = {f"{leaf}, {nest}": NESTS[nest](LEAVES[leaf]) for nest in NESTS for leaf in LEAVES}

RECORD = closed({"a": LETTERS, "b": DIGIT, "c": {"type": "boolean"}})
LISTS = {"type": "array", "items": LETTERS, "maxItems": 4}
CHECKED = {
    "distinct": LISTS | {"uniqueItems": True, "minItems": 2},
    "all distinct": LISTS | {"uniqueItems": True, "minItems": 4},
    "distinct records": {"type": "array", "items": closed({"a": {"enum": [1, 2]}}, required=["a"]), "uniqueItems": True,
                         "minItems": 2, "maxItems": 2},
    "distinct numbers": {"type": "array", "items": DIGIT, "uniqueItems": True, "minItems": 3, "maxItems": 5},
    "distinct texts": {"type": "array", "items": {"type": "string", "maxLength": 2}, "uniqueItems": True, "minItems": 3,
                       "maxItems": 3},
    "contains": LISTS | {"contains": {"const": "d"}},
    "contains two": LISTS | {"contains": {"const": "d"}, "minContains": 2},
    "contains at most one": LISTS | {"contains": {"const": "d"}, "maxContains": 1, "minItems": 3},
    "contains a number": {"type": "array", "items": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
                          "contains": {"const": 17}, "maxItems": 3},
    "needs another": RECORD | {"dependentRequired": {"a": ["b"], "b": ["c"]}},
    "needs a schema": RECORD | {"dependentSchemas": {"a": {"required": ["c"], "properties": {"c": {"const": True}}}}},
    "names": {"type": "object", "additionalProperties": DIGIT, "propertyNames": {"enum": ["x", "y"]},
              "minProperties": 1, "maxProperties": 2},
    "not a value": RECORD | {"not": {"properties": {"a": {"const": "a"}}, "required": ["a"]}, "required": ["a"]},
    "not empty": RECORD | {"not": {"maxProperties": 0}},
    "not even": {"type": "array", "items": DIGIT | {"not": {"multipleOf": 2}}, "minItems": 2, "maxItems": 2},
    "if then": RECORD | {"if": {"required": ["a"]}, "then": {"required": ["c"]}},
    "if then else": RECORD | {"if": {"properties": {"a": {"const": "a"}}, "required": ["a"]},
                              "then": {"required": ["b"]}, "else": {"required": ["c"]}},
    "one of two keys": RECORD | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one of two ranges": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"oneOf": [
        {"type": "integer", "minimum": 1, "maximum": 6}, {"type": "integer", "minimum": 4, "maximum": 9}]}},
    "several keys": RECORD | {"minProperties": 2},
    "in a property": closed({"l": LISTS | {"uniqueItems": True, "minItems": 3}, "n": DIGIT}, required=["l", "n"]),
    "by reference": {"type": "array", "items": {"$ref": "#/$defs/l"}, "minItems": 1, "maxItems": 2, "$defs": {
        "l": {"type": "array", "items": {"enum": [0, 1]}, "uniqueItems": True, "minItems": 2, "maxItems": 2}}},
    "two at once": LISTS | {"uniqueItems": True, "contains": {"const": "b"}, "minItems": 2},
}


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    return GrammarEngine(TOKENIZER, len(TOKENIZER), [END])


def written(engine: GrammarEngine, constraint: Constraint, seed: int) -> Iterator[str]:
    """A text under uniform random logits, closed soon where it is long; none where it does not end."""
    constraint.begin(0, SPELLED.__getitem__)
    matcher, chance, ids = engine.compile(*constraint.grammar()).matcher(), Random(seed), []
    while not matcher.stopped and len(ids) < 4 * MOST:
        mask = matcher.mask()
        if constraint.narrows:
            mask = constraint.narrow(mask[None], [ids])[0]
        allowed = mask.nonzero()[:, 0].tolist()
        assert allowed, f"trapped after {TOKENIZER.decode(ids)}{constraint.dead_end(ids)}"
        assert all(constraint.permits(ids, token, len(mask)) for token in allowed[:4])
        closers = [token for token in allowed if SPELLED[token] in (b'"', b"]", b"}")] or [
            token for token in allowed if SPELLED[token].isalnum()]
        ids.append(chance.choice(closers if closers and (len(ids) > MOST or chance.random() < 0.3) else allowed))
        assert matcher.advance(ids[-1])
    if matcher.stopped:
        yield TOKENIZER.decode([token for token in ids if token != END])


def check(engine: GrammarEngine, constraint: Constraint, schema: dict) -> None:
    texts = [text for seed in range(TRIES) for text in written(engine, constraint, seed)]
    assert texts, "no text ended"
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for text in texts:
        validator.validate(json.loads(text))


@pytest.mark.oracle("json_schema")
@pytest.mark.parametrize("name", MASKED)
def test_every_finished_text_is_valid_and_no_lane_is_trapped(engine, name):
    check(engine, make("json_schema", source=json.dumps(MASKED[name])), MASKED[name])


@pytest.mark.oracle("checked_schema")
@pytest.mark.parametrize("name", CHECKED)
def test_a_checked_schema_looks_ahead_and_ends_in_a_valid_text(engine, name):
    with pytest.raises(Refusal, match="checked_schema"):
        engine.compile(*make("json_schema", source=json.dumps(CHECKED[name])).grammar())
    check(engine, make("checked_schema", source=json.dumps(CHECKED[name])), CHECKED[name])


class LooksAtTheTokenOnly(find("checked_schema")):
    """Without the search for the rest of the text."""

    def _passes(self, text, added, ending, listed):
        return ending.isdisjoint(added) or self._verdict(text + added) is not False


@pytest.mark.refuses("checked_schema")
@pytest.mark.parametrize("name", ["all distinct", "in a property", "by reference"])
def test_without_looking_ahead_a_lane_is_trapped(engine, name):
    with pytest.raises(AssertionError, match="trapped after"):
        for seed in range(20):
            list(written(engine, LooksAtTheTokenOnly(json.dumps(CHECKED[name])), seed))


@pytest.mark.strategy("checked_schema")
@pytest.mark.parametrize("schema, keyword", [
    (LISTS | {"uniqueItems": True, "minItems": 5, "maxItems": 5}, "uniqueItems"),
    (LISTS | {"contains": {"const": "z"}}, "contains"),
    (RECORD | {"not": {}}, "not"),
])
def test_a_schema_that_no_document_satisfies_is_refused_before_a_run(schema, keyword):
    with pytest.raises(Refusal, match=f"no document satisfies it, .* breaks .*{keyword}"):
        make("checked_schema", source=json.dumps(schema)).check_source()


@pytest.mark.strategy("checked_schema")
def test_the_sweep_is_large_and_a_masked_row_is_a_mask():
    assert len(MASKED) >= 100 and len(CHECKED) >= 20
    constraint = make("checked_schema", source=json.dumps(CHECKED["distinct"]))
    constraint.begin(0, SPELLED.__getitem__)
    assert constraint.narrow(torch.ones(2, 256, dtype=torch.bool), [[], []]).shape == (2, 256)
