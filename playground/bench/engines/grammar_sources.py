"""The grammars that both engines compile: some of every kind, and the JSON Schemas of folders."""
from __future__ import annotations

import json
from dataclasses import dataclass

from playground.asset_files import ASSETS
from playground.bench.schemas.cases import Case, Instance, read_cases
from playground.bench.schemas.schema_trial import spellings

REGEXES = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "words": r"([A-Z][a-z]{1,9} ){2,4}[a-z]+\.",
    "identifier": r"[a-z_][a-z0-9_]{0,20}",
    "address": r"(25[0-5]|2[0-4][0-9]|1?[0-9]{1,2})(\.(25[0-5]|2[0-4][0-9]|1?[0-9]{1,2})){3}",
    "letters of any alphabet": r"\w{1,12}",
    "anything but quotes": r'"[^"\\\n]{0,20}"',
}
GBNF = {
    "sum": 'root ::= term (" + " term)* " = " number\nterm ::= number | "(" term " * " term ")"\nnumber ::= [0-9]{1,4}',
    "list": 'root ::= item+\nitem ::= "- " [^\\n]{1,30} "\\n"',
    "move": 'root ::= [1-9] [0-9]? ". " move " " move "\\n"\nmove ::= piece? [a-h] [1-8] ("=" piece)? [+#]?\n'
    'piece ::= [NBKQR]',
    "nested": 'root ::= "(" root ")" | "[" root "]" | ("a" | "b")*',
}
SCHEMAS = {
    "shop": {
        "type": "object",
        "properties": {
            "owner": {"type": "string"},
            "sells": {"type": "array", "items": {"enum": ["bread", "fish", "cheese"]}, "maxItems": 3},
            "size": {"enum": ["small", "medium", "large"]},
        },
        "required": ["owner", "size"],
        "additionalProperties": False,
    },
    "any object": {"type": "object"},
    "number between": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "next": {"$ref": "#/$defs/node"}},
            "required": ["name"],
            "additionalProperties": False,
        }},
    },
}


@dataclass(frozen=True)
class GrammarSource:
    """A grammar, and texts that are known to satisfy it or not."""

    kind: str
    name: str
    text: str
    instances: tuple[tuple[tuple[str, ...], bool], ...] = ()  # spellings, and whether they are valid


def grammar_sources(folders: list[str]) -> list[GrammarSource]:
    """Grammars of every kind, then the schemas of the folders."""
    schemas = [Case(name, "", schema) for name, schema in SCHEMAS.items()]
    schemas += [case for folder in folders for case in read_cases(folder)]
    larks = sorted((ASSETS / "grammars").glob("*.lark"))
    return [
        *(GrammarSource("regex", name, pattern) for name, pattern in REGEXES.items()),
        *(GrammarSource("gbnf", name, text) for name, text in GBNF.items()),
        *(GrammarSource("lark", path.stem, path.read_text(encoding="utf-8-sig")) for path in larks),
        *(_of_schema(case) for case in schemas),
    ]


def _of_schema(case: Case) -> GrammarSource:
    instances = tuple(_spelled(case, instance) for instance in case.instances)
    return GrammarSource("json_schema", case.name, json.dumps(case.schema), instances)


def _spelled(case: Case, instance: Instance) -> tuple[tuple[str, ...], bool]:
    return tuple(spellings(instance.data, case.schema)), instance.valid
