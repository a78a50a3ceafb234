"""Rules and schemas without a finite text are refused before a run, whatever the tokenizer, or are never entered."""
from __future__ import annotations

import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher
from toys import byte_tokenizer

from playground.contract import make
from playground.errors import Refusal
from playground.grammar.client import compiled_tables
from playground.grammar.lark.gbnf_expressions import rules_of
from playground.grammar.lark.productive_rules import endless, rules_of_lark
from playground.grammar.matcher import GrammarEngine
from playground.grammar.schema.productive_schema import lost_places, without_endless
from playground.grammar.schema.source import understood

TOKENIZER = byte_tokenizer(merges=0)
INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}
ENDLESS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/d"}}, "required": ["n"],
           "additionalProperties": False}
DEFS = {"$defs": {"d": ENDLESS}}


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    return GrammarEngine(TOKENIZER, len(TOKENIZER), [TOKENIZER.eos_token_id])


def closed(properties: dict, **more) -> dict:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


# --- schemas ---

NO_DOCUMENT = {
    "itself": {"$ref": "#"},
    "a required property": closed({"v": INTEGER, "next": {"$ref": "#"}}, required=["v", "next"]),
    "two definitions": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "an array that needs an item": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "a first item": {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    "other properties": {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["x"]},
    "as many properties": {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
    "every alternative": {"anyOf": [{"$ref": "#/$defs/d"}, closed({"a": {"$ref": "#"}}, required=["a"])], **DEFS},
    "asked for elsewhere": {"type": "object", "properties": {"n": {"$ref": "#"}}, "allOf": [{"required": ["n"]}]},
    "where OpenAPI has schemas": {
        "components": {"schemas": {"N": closed({"n": {"$ref": "#/components/schemas/N"}}, required=["n"])}},
        "$ref": "#/components/schemas/N",
    },
    "a reference with a percent sign": {
        "$defs": {"a b": closed({"n": {"$ref": "#/$defs/a%20b"}}, required=["n"])}, "$ref": "#/$defs/a%20b",
    },
    "apart": {"allOf": [{"type": "object", "required": ["n"]}, {"properties": {"n": {"$ref": "#"}}}]},
}
FINITE = {  # schema, and what is left out of it
    "an optional property": (closed({"v": INTEGER, "next": {"$ref": "#"}}, required=["v"]), []),
    "or null": (closed({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, required=["next"]), []),
    "one of two types": (closed({"n": {"$ref": "#"}}, required=["n"]) | {"type": ["object", "null"]}, []),
    "an array of itself": ({"type": "array", "items": {"$ref": "#"}, "maxItems": 2}, []),
    "a property without a document": (closed({"v": INTEGER, "dead": {"$ref": "#/$defs/d"}}, required=["v"]) | DEFS,
                                      ["#/properties/dead"]),
    "an alternative without one": (closed({"v": {"anyOf": [INTEGER, {"$ref": "#/$defs/d"}]}}, required=["v"]) | DEFS,
                                   ["#/properties/v/anyOf/1"]),
    "items without one": ({"type": "array", "items": {"$ref": "#/$defs/d"}, **DEFS}, ["#/items"]),
    "a type without one": (closed({"n": {"$ref": "#/$defs/d"}}, required=["n"]) | {"type": ["object", "null"]} | DEFS,
                           ["#/properties/n"]),
}


@pytest.mark.strategy("json_schema", "checked_schema")
@pytest.mark.parametrize("name", NO_DOCUMENT)
def test_a_schema_without_a_finite_document_is_refused_with_the_circle(engine, name):
    with pytest.raises(Refusal, match="no finite document fits it, since #.* needs #.* for ever") as refused:
        engine.compile(*make("json_schema", source=json.dumps(NO_DOCUMENT[name])).grammar())
    assert "\n" not in str(refused.value)


def walk(engine: GrammarEngine, schema: dict, seed: int) -> str | None:
    """A text under uniform random logits; None if it does not end."""
    matcher, chance, ids = engine.compile(*make("json_schema", source=json.dumps(schema)).grammar()).matcher(), \
        random.Random(seed), []
    while not matcher.stopped and len(ids) < 300:
        allowed = matcher.mask().nonzero()[:, 0].tolist()
        assert allowed, f"trapped after {TOKENIZER.decode(ids)}"
        ids.append(chance.choice(allowed))
        matcher.advance(ids[-1])
    return TOKENIZER.decode(ids[:-1] if ids[-1] == TOKENIZER.eos_token_id else ids) if matcher.stopped else None


@pytest.mark.oracle("json_schema")
@pytest.mark.parametrize("name", FINITE)
def test_a_lane_is_never_trapped_in_a_part_without_a_finite_document(engine, name):
    schema, left_out = FINITE[name]
    assert [each.place for each in lost_places(schema) if not each.types and "/$defs/" not in each.place] == left_out
    assert all(any(place in remark for remark in understood(schema).remarks) for place in left_out)
    texts = [text for seed in range(12) if (text := walk(engine, schema, seed))]
    assert len(texts) >= 6
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.refuses("json_schema")
def test_a_mask_of_the_schema_as_it_is_would_enter_such_a_part(engine):
    """Which llguidance does by itself, so that the walk above would never end there."""
    schema = FINITE["items without one"][0] | {"x-guidance": {"whitespace_flexible": False}}
    for source, enters in ((schema, True), (without_endless(schema), False)):
        matcher = LLMatcher(engine.llguidance, LLMatcher.grammar_from_json_schema(json.dumps(source)), log_level=0)
        assert matcher.consume_token(TOKENIZER.encode("[")[0])
        assert (matcher.validate_tokens(TOKENIZER.encode("{")) == 1) is enters


@pytest.mark.parametrize("schema", [FINITE["an optional property"][0], {"$defs": {"a": INTEGER}, "$ref": "#/$defs/a"}])
def test_a_schema_whose_references_end_stays_as_it_is(schema):
    assert without_endless(schema) == schema


# --- rules ---

RULES = {  # GBNF, Lark, and the circle; None if every rule ends
    "itself": ('root ::= "a" root', 'start: "a" start', "needs {start}"),
    "left recursion": ('root ::= root "a"', 'start: start "a"', "needs {start}"),
    "left recursion that ends": ('root ::= root "a" | "b"', 'start: start "a" | "b"', None),
    "right recursion that ends": ('root ::= "a" root | "b"', 'start: "a" start | "b"', None),
    "an alternative": ('root ::= a | "x"\na ::= "x" a', 'start: a | "x"\na: "x" a', "enters a .*: a needs a"),
    "an option": ('root ::= "x" a?\na ::= b "q"\nb ::= a | a "y"', 'start: "x" [a]\na: b "q"\nb: a | a "y"',
                  "a needs b, which needs a"),
    "a repeat": ('root ::= a{0,3} "z"\na ::= "y" a', 'start: a~0..3 "z"\na: "y" a', "a needs a"),
    "not referred to": ('root ::= "x"\na ::= "y" a', 'start: "x"\na: "y" a', None),
    "an empty one": ('root ::= a "x"\na ::= "y" a |', 'start: a "x"\na: "y" a |', None),
}


@pytest.mark.strategy("gbnf", "lark", "syncode")
@pytest.mark.parametrize("name", RULES)
def test_rules_that_never_end_are_refused_with_the_circle(engine, name):
    *sources, says = RULES[name]
    for kind, start, source in zip(("gbnf", "lark"), ("root", "start"), sources):
        if says is None:
            assert engine.compile(kind, source).matcher().mask().any()
        else:
            with pytest.raises(Refusal, match=says.format(start=start)):
                engine.compile(kind, source)
    if says and name != "itself" and "left" not in name:
        with pytest.raises(Refusal, match=says):
            compiled_tables(sources[1])


def test_rules_are_read_beside_what_only_llguidance_knows():
    source = '''%llguidance {}
    start: "x" (a | T)~2 %json {"a": {"b": "a"}} | /[/a]\\//i -> c  // a comment: a
    ?a[lazy]: "y" <end>
        | T a  "a: a" /a: a/
    b: a
    T: "t" T | "u"
    %ignore / +/
    '''
    assert endless(rules_of_lark(source), "start") is None
    assert "a needs a" in endless(rules_of_lark(source.replace('"y" <end>', '"y" a')), "start")


def ends(grammar: dict[str, list[list[str]]], symbol: str, height: int) -> bool:
    """Whether a symbol has a derivation tree of this height at most."""
    return symbol == "x" or height > 0 and any(
        all(ends(grammar, each, height - 1) for each in option) for option in grammar[symbol]
    )


@pytest.mark.oracle("gbnf", "lark")
def test_the_fixpoint_agrees_with_derivations_of_bounded_height():
    """Independent: which rules have a derivation tree as high as there are rules, by recursion."""
    chance, names, found = random.Random(0), ["root", "a", "b", "c"], []
    for _ in range(300):
        grammar = {name: [[chance.choice([*names, "x"]) for _ in range(chance.randint(0, 3))]
                          for _ in range(chance.randint(1, 2))] for name in names}

        reached = ["root"]
        for name in reached:
            reached += {each for option in grammar[name] for each in option if each != "x"} - set(reached)
        expected = all(ends(grammar, name, len(names)) for name in reached)
        gbnf = "\n".join(f"{name} ::= " + " | ".join(" ".join(f'"{s}"' if s == "x" else s for s in option) or '""'
                                                     for option in options) for name, options in grammar.items())
        lark = gbnf.replace("::=", ":")
        assert (endless(rules_of(gbnf), "root") is None) == (endless(rules_of_lark(lark), "root") is None) == expected
        found.append(expected)
    assert 60 < sum(found) < 240


def test_long_chains_of_rules_and_references_are_followed_in_a_bounded_time():
    rules = {**{f"r{i}": [f"r{i + 1}"] for i in range(3000)}, "r3000": ['"x"']}
    source = "\n".join(f"{name}: {body[0]}" for name, body in rules.items())
    assert endless(rules_of_lark(source), "r0") is None
    needs_one = {"type": "array", "minItems": 1}
    definitions = {f"d{i}": {**needs_one, "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(500)}
    assert lost_places({"$ref": "#/$defs/d0", "$defs": {**definitions, "d500": INTEGER}}) == []
