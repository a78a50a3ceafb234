"""Reads what people give as a JSON Schema.

Chat APIs take a schema inside of other objects: {"name", "strict", "schema"}, {"type": "json_schema", "json_schema":
{...}}, a tool with its parameters. The schema is taken out of them, which a remark says. A name that is no keyword of
JSON Schema enforces nothing, so it is a remark, with the keyword that is probably meant; an object in which nothing
else is known is refused.
"""
from __future__ import annotations

import json
from typing import Any, NamedTuple

from playground.errors import Refusal
from playground.grammar.schema.keywords import ASSERTING, KNOWN, asserts, nearest, unknown_keywords
from playground.grammar.schema.productive_schema import endless_remarks

AROUND = (  # keys under which chat APIs take a schema, or an object with one
    "response_format responseFormat json_schema jsonSchema schema function parameters input_schema inputSchema"
    " output_schema outputSchema response_schema responseSchema response_json_schema responseJsonSchema"
    " responseFormatSchema guided_json guidedJson structured_outputs json format text output_config generationConfig"
    " generation_config extra_body config"
).split()
EVERYDAY = ("function", "json", "format", "text", "config")  # which may be names of properties, too
ANY_OBJECT = "json_object"  # a response format: some JSON object
LEVELS = 6  # objects around a schema
REMARKS = 4  # about unknown names; more are counted
FORM = '{"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}'


class SchemaSource(NamedTuple):
    """A schema, and what a person should know about how it was read, in sentences."""

    schema: dict | bool
    remarks: list[str]


def read_schema(source: str) -> SchemaSource:
    """The schema in a text; raises Refusal if there is none."""
    try:
        given = json.loads(source)
    except ValueError as reason:
        raise Refusal(f"The JSON Schema is not valid JSON: {str(reason).partition(';')[0]}.") from None
    except RecursionError:
        raise Refusal("The JSON Schema cannot be used: it is nested too deeply. Change or remove that part.") from None
    return understood(given)


def understood(given: Any) -> SchemaSource:
    """The schema in a value, without what is around it; raises Refusal if there is none."""
    schema, path = _unwrapped(given)
    if not isinstance(schema, (dict, bool)):
        raise Refusal(
            f"A JSON Schema is an object in braces, not {json.dumps(schema, ensure_ascii=False)[:40]}."
            + (" A list of tools is for tool_calls." if isinstance(schema, list) and _tools(schema) else "")
        )
    remarks = [_remark_about(path)] if path else []
    if isinstance(schema, dict):
        remarks += _checked(schema) + endless_remarks(schema)
    return SchemaSource(schema, remarks)


def _remark_about(path: list[str]) -> str:
    if path[-1] == ANY_OBJECT:
        return f"The format {ANY_OBJECT} is read as a JSON Schema for any object."
    return f"The JSON Schema was read from {'.'.join(path)}; what is around it is ignored."


def _tools(values: list) -> bool:
    return any(isinstance(value, dict) and {"function", "parameters"} & value.keys() for value in values)


def _unwrapped(given: Any) -> tuple[Any, list[str]]:
    """The schema and the keys that lead to it; x-guidance beside a wrapper stays with the schema."""
    path: list[str] = []
    for _ in range(LEVELS):
        given = _parsed(given)
        key = _key_around(given)
        if key is None:
            break
        options = {"x-guidance": given["x-guidance"]} if "x-guidance" in given else {}
        inner = {"type": "object"} if key == ANY_OBJECT else given[key]
        given, path = {**options, **inner} if isinstance(inner, dict) else inner, [*path, key]
    return given, path


def _parsed(given: Any) -> Any:
    """A schema that was given as a string of JSON."""
    if not isinstance(given, str) or given.strip()[:1] != "{":
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given


def _key_around(given: Any) -> str | None:
    """The key that leads to the schema; None where the object is one itself."""
    if not isinstance(given, dict) or asserts({key: part for key, part in given.items() if key != "type"}):
        return None
    if given.get("type") == ANY_OBJECT:
        return ANY_OBJECT
    key = next((key for key in AROUND if _may_be_schema(key, given.get(key))), None)
    others = [part for name, part in given.items() if name not in (*AROUND, "x-guidance")]
    return None if any(isinstance(part, dict) for part in others) else key


def _may_be_schema(key: str, part: Any) -> bool:
    """Whether a schema is expected under a key. Some of the keys may also be properties in a list of them."""
    part = _parsed(part)
    if not isinstance(part, dict):
        return False
    return key not in EVERYDAY or _key_around(part) is not None or len([name for name in part if name in ASSERTING]) > 1


def _checked(schema: dict) -> list[str]:
    """Remarks about names that are no keywords; raises Refusal for a schema that has nothing else."""
    found = unknown_keywords(schema)
    for place, part, names in found:
        if place == "#" and not asserts(part) or len(names) == len(part) and any(map(nearest, names[:REMARKS])):
            raise Refusal(_says_nothing(place, names))
    count = sum(len(names) for _, _, names in found)
    if count == 0 and not asserts(schema):
        return ["The JSON Schema says nothing about a value: any JSON fits it."]
    shown = [_remark(place, name) for place, _, names in found[:REMARKS] for name in names[:REMARKS]][:REMARKS]
    more = [f"{count - len(shown):,} more names in the JSON Schema are no keywords."] if count > len(shown) else []
    return shown + more


def _remark(place: str, name: str) -> str:
    if name in KNOWN:
        return f"{name!r} at {place[:80]} has a value that this keyword of JSON Schema cannot have, and is ignored."
    meant = f"write {nearest(name)} if that is meant" if nearest(name) else "it enforces nothing"
    return f"{name[:40]!r} at {place[:80]} is no keyword of JSON Schema and is ignored: {meant}."


def _says_nothing(place: str, names: list[str]) -> str:
    where = "The JSON Schema" if place == "#" else f"The JSON Schema at {place[:80]}"
    shown = ", ".join(repr(name[:40]) for name in names[:REMARKS])
    meant = [f"{nearest(name)} for {name!r}" for name in names[:REMARKS] if nearest(name)]
    advice = f"Write {', '.join(meant)}." if meant else f'Properties are listed under "properties", as in {FORM}.'
    return f"{where} enforces nothing: it has no keyword of JSON Schema, only {shown}. {advice}"
