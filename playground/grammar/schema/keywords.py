"""The keywords of JSON Schema, by the types of their values, and what is written in their place.

Of drafts 4 to 2020-12. Validators ignore what is no keyword, so a misspelt one enforces nothing: `unknown_keywords`
finds them. Annotations, extensions ("x-...") and the keywords that editors, OpenAPI and code generators add are known.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import accumulate
from typing import Any
from urllib.parse import unquote

SCHEMA, NUMBER, MAP = (dict, bool), (int, float), (dict,)
KINDS: dict[tuple[type, ...], str] = {
    SCHEMA: "not if then else contains propertyNames additionalProperties additionalItems unevaluatedProperties"
            " unevaluatedItems",
    (dict, bool, list): "items",
    (list,): "allOf anyOf oneOf prefixItems enum required",
    MAP: "properties patternProperties dependencies dependentSchemas dependentRequired",
    NUMBER: "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf minLength maxLength minItems maxItems"
            " minContains maxContains minProperties maxProperties",
    (str,): "pattern format $ref $dynamicRef $recursiveRef",
    (str, list): "type",
    (bool,): "uniqueItems",
    (object,): "const",
}
OLDER = {bool: ("exclusiveMinimum", "exclusiveMaximum")}  # values of draft 4, which the engine reads
NOTES: dict[tuple[type, ...], str] = {
    (str,): "title description $comment $schema $id id $anchor $dynamicAnchor contentEncoding contentMediaType",
    (list,): "examples",
    (bool,): "readOnly writeOnly deprecated $recursiveAnchor",
    MAP: "$defs definitions $vocabulary x-guidance",
    SCHEMA: "contentSchema",
    (object,): "default example",
}
ASSERTING = {key: kinds for kinds, keys in KINDS.items() for key in keys.split()}
KNOWN = ASSERTING | {key: kinds for kinds, keys in NOTES.items() for key in keys.split()}
VENDORS = frozenset(
    "discriminator xml externalDocs enumNames enumTitles enumDescriptions markdownEnumDescriptions markdownDescription"
    " errorMessage errorMessages defaultSnippets deprecationMessage patternErrorMessage doNotSuggest suggestSortText"
    " allowComments allowTrailingCommas tsType tsEnumNames javaType existingJavaType javaInterfaces goType"
    " propertyOrder propertyOrdering headerTemplate options links media faker chance sensitive secret order unit units"
    " widget placeholder hint helpText displayName label tags group hidden scope version name strict author license"
    " cache_control since notes source env env_names env_var extra".split()
)
EXTENSION = re.compile(r"[xX]-|[$_@]|.*:")  # vendors' prefixes: x-order, $async, ui:widget
MEANT = {  # what other languages and older drafts write
    "divisibleBy": "multipleOf", "disallow": "not", "extends": "allOf", "min": "minimum", "max": "maximum",
    "minLen": "minLength", "maxLen": "maxLength", "optional": "required", "values": "enum", "choices": "enum",
    "allowedValues": "enum", "regex": "pattern", "fields": "properties", "attributes": "properties",
    "elements": "items", "item": "items", "ref": "$ref", "defs": "$defs", "gt": "exclusiveMinimum",
    "nullable": '"type" with "null" in its list',
    "lt": "exclusiveMaximum", "ge": "minimum", "le": "maximum", "unique": "uniqueItems", "equals": "const",
}
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
TYPES_MEANT = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "decimal": "number", "bool": "boolean", "dict": "object", "map": "object", "record": "object", "struct": "object",
    "list": "array", "tuple": "array", "set": "array", "none": "null", "nil": "null",
}
CHECKABLE = frozenset(  # what `checked_schema` decides beside a mask
    "not if then else uniqueItems oneOf contains minContains maxContains dependentRequired dependentSchemas"
    " propertyNames".split()
)
SINGLE = ("not", "if", "then", "else", "contains", "propertyNames", "additionalProperties", "additionalItems",
          "unevaluatedProperties", "unevaluatedItems", "contentSchema", "items")
DATA = ("enum", "const", "default", "example", "examples", "required", "x-guidance")  # no schemas in there
LISTED, NAMED = ("allOf", "anyOf", "oneOf", "prefixItems", "items"), (
    "properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions",
)
CLOSE = 0.75  # ratio of `difflib` from which a name is taken for a misspelt one
LOOKED_UP, LONGEST = 12, 40  # names compared with the known ones, and their characters


def located(schema: Any) -> Iterator[tuple[str, dict]]:
    """Every schema that is an object, itself first, with its place as a JSON pointer: "#", "#/properties/a". Those that
    only a $ref leads to, as under #/components/schemas of OpenAPI, are last.
    """
    waiting, seen = [("#", schema)], set()
    elsewhere: dict[str, Any] = {}
    while waiting or elsewhere:
        place, part = waiting.pop() if waiting else elsewhere.popitem()
        if isinstance(part, dict) and place not in seen:
            seen.add(place)
            yield place, part
            waiting += reversed([(f"{place}/{step}", inner) for step, inner in below(part)])
            if (other := reference(part)) and other not in seen:
                elsewhere[other] = at(schema, other)


def reference(schema: dict) -> str:
    """The place in the same document that the $ref of a schema names; empty if there is none."""
    name = schema.get("$ref")
    return unquote(name) if isinstance(name, str) and (name == "#" or name.startswith("#/")) else ""


def at(schema: Any, place: str) -> Any:
    """The value at a place of a JSON value; None if it has no such place."""
    for step in place.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and step.isdecimal():
            schema = schema[int(step)] if int(step) < len(schema) else None
        else:
            schema = schema.get(step) if isinstance(schema, dict) else None
    return schema


def below(schema: dict) -> Iterator[tuple[str, Any]]:
    """The schemas that the keywords of a schema contain, each with its steps from there."""
    for key, part in schema.items():
        if key in NAMED and isinstance(part, dict):
            yield from ((f"{key}/{escaped(name)}", inner) for name, inner in part.items())
        elif key in LISTED and isinstance(part, list):
            yield from ((f"{key}/{number}", inner) for number, inner in enumerate(part))
        elif key in SINGLE:
            yield key, part


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def asserts(schema: dict) -> bool:
    """Whether a schema has a keyword that says something about values."""
    return any(_fits(part, ASSERTING[key]) for key, part in schema.items() if key in ASSERTING)


def unknown(schema: dict) -> list[str]:
    """The names in a schema that are neither keywords nor known extensions, and notes whose value no note can have.

    Where nothing is asserted, an extension that contains a schema is a property in the wrong place.
    """
    silent = not asserts(schema)
    return [
        key for key, part in schema.items() if not _is_known(key, part, silent) or silent and _is_property(key, part)
    ]


def _is_known(key: str, part: Any, silent: bool) -> bool:
    if key in KNOWN:
        # the engine refuses a wrong value of a keyword, but not where the type of the values is another one
        return _fits(part, KNOWN[key]) or key in ASSERTING and (silent or key in OLDER.get(type(part), ()))
    return key in VENDORS or EXTENSION.match(key) is not None


def _is_property(key: str, part: Any) -> bool:
    return key in VENDORS and isinstance(part, dict) and asserts(part)


def _fits(part: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(part, kinds) and not (isinstance(part, bool) and kinds is NUMBER)


def unknown_keywords(schema: Any) -> list[tuple[str, dict, list[str]]]:
    """The places with unknown names: the place, the schema there, and the names. One through which a $ref leads is
    known.
    """
    parts = list(located(schema))
    led = {way for _, part in parts for way in accumulate(reference(part).split("/"), "{}/{}".format)}
    found = ((place, part, [name for name in unknown(part) if f"{place}/{escaped(name)}" not in led])
             for place, part in parts)
    return [(place, part, names) for place, part, names in found if names]


def nearest(name: str) -> str:
    """The keyword that is probably meant; empty if none is close. A known one with another type of value is itself."""
    if name in KNOWN or len(name) > LONGEST:
        return ""
    if name in MEANT:
        return MEANT[name]
    plain = {key.lower().lstrip("$"): key for key in KNOWN}
    close = get_close_matches(name.lower().replace("_", "").replace("-", ""), plain, 1, CLOSE)
    return plain[close[0]] if close else ""


def nearest_type(name: str) -> str:
    """The type that is probably meant; empty if none is close."""
    if (lower := name.lower()[:LONGEST]) in TYPES_MEANT:
        return TYPES_MEANT[lower]
    return next(iter(get_close_matches(lower, TYPES, 1, CLOSE)), "")
