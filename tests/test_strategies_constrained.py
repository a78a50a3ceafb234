"""Constraints: what their texts are held against, by validators that share nothing with the grammar engine."""
from __future__ import annotations

import json
import re

import jsonschema

from playground.recipe import assemble, Recipe

RECORD = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
                                           "likes": {"type": "array", "items": {"enum": ["tea", "trees"]}, "minItems": 1, "maxItems": 2}},
          "required": ["name", "age", "likes"], "additionalProperties": False}
LEVELS = {"enum": ["low", "high", 3, None]}
SUM = 'start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[1-9][0-9]?/'
COLOURS = "red|green|greenish|Größe"


def fits(schema: dict):
    def valid(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True
    return valid


def spells(pattern: str):
    return lambda text: re.fullmatch(pattern, text) is not None


def one_of(options: str):
    return lambda text: text in options.split("|")


SOUND = {
    "json_schema": [({"source": json.dumps(RECORD)}, fits(RECORD)), ({"source": json.dumps(LEVELS)}, fits(LEVELS))],
    "regex": [({"pattern": "(the|then) (fox|bird)?[0-2]{1,4}"}, spells("(the|then) (fox|bird)?[0-2]{1,4}"))],
    "lark": [({"source": SUM}, spells(r"[1-9][0-9]?(\+[1-9][0-9]?){1,3}"))],
    "choice": [({"options": COLOURS}, one_of(COLOURS))],
}


def test_a_constraint_names_its_grammar_as_it_was_written():
    assert assemble(Recipe("greedy", {}, [("choice", {"options": "a|b"})])).constraint.grammar() == ("choice", "a|b")
