"""JSON Schemas as the grammar engine can enforce them to the letter.

llguidance refuses keywords it does not know, but some things it accepts could end in a text that its schema does not
allow:

- a key may be spelled with escapes where keys of any name may follow, so {"\\u0061": ...} slips past the schema of "a";
- the same key may be written twice, and `minProperties` counts both;
- some formats are read too widely;
- `x-guidance` may ask for leniency.

The first and the third are mended: other keys become a pattern that holds for what is spelled, and formats become
patterns (`string_formats`). The rest, and what such a pattern cannot say, is refused.

The named keys of an object are written in the order of the schema, before all others. So a named key whose turn is over
could be begun and not be closed, and a model would have to go on with a key that it does not mean: other keys therefore
begin with no named one, and every key can be closed wherever it has been begun.
"""
from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from itertools import dropwhile, takewhile
from typing import Any

from playground.errors import Refusal
from playground.grammar import limits
from playground.grammar.schema.keywords import DATA
from playground.grammar.schema.productive_schema import without_endless
from playground.grammar.schema.shared_names import named, names_together
from playground.grammar.schema.string_formats import tightened

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
ANY = r"[\s\S]"
TOLD_APART = 64  # named keys that other keys are kept apart from, character by character
FIXED_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # of x-guidance
LENIENT = ("lenient", "coerce_one_of")
LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def check_size(schema: Any) -> None:
    """Raises Refusal, with the bound and the value, for a schema that is larger than `grammar.limits` allows."""
    for number, (value, depth) in enumerate(_values(schema)):
        _bounded("values in all", number + 1, limits.SCHEMA_NODES)
        _bounded("levels of objects and arrays", depth, limits.SCHEMA_DEPTH)
        if isinstance(value, dict):
            _check_keywords(value)
        elif isinstance(value, int | float):
            _bounded("digits in a number", len(f"{value}"), limits.NUMBER_DIGITS)
    _check_references(schema)


def _values(schema: Any) -> Iterator[tuple[Any, int]]:
    """Every value in a JSON value, itself first, and how many objects and arrays are around it."""
    waiting = [(schema, 0)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(part, depth + 1) for part in inner]


def _check_keywords(schema: dict) -> None:
    for key, most in (
        ("enum", limits.ENUM_VALUES),
        ("properties", limits.PROPERTIES),
        ("pattern", limits.PATTERN_CHARACTERS),
    ):
        if isinstance(schema.get(key), (list, dict, str)):
            _bounded(f"{'characters' if key == 'pattern' else 'entries'} in {key}", len(schema[key]), most)
    for key in LENGTHS:
        if _is_number(schema.get(key)):
            _bounded(f"as {key}", schema[key], limits.LENGTH)
    if _is_number(multiple := schema.get("multipleOf")):
        digits = "".join(map(str, Decimal(str(multiple)).normalize().as_tuple().digits))
        _bounded("as the digits of multipleOf", int(digits), limits.MULTIPLE_OF)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_references(schema: Any) -> None:
    """No $ref may lead to a $ref, and so on, more than REF_CHAIN times."""
    for value, _ in _values(schema):
        length, seen = 0, set()
        while isinstance(value, dict) and isinstance(name := value.get("$ref"), str) and name not in seen:
            length, value = length + 1, _target(schema, name)
            _bounded("$refs in a chain", length, limits.REF_CHAIN)
            seen.add(name)


def _target(schema: Any, name: str) -> Any:
    """What a $ref such as #/$defs/a leads to; None where it is not in this schema."""
    for step in name.removeprefix("#").split("/")[1:] if name.startswith("#/") else [None]:
        step = step and step.replace("~1", "/").replace("~0", "~")
        schema = schema.get(step) if isinstance(schema, dict) else None
    return schema


def _bounded(what: str, found: float, most: int) -> None:
    if found > most:
        raise Refusal(
            f"The JSON Schema cannot be used: it has {found:,} {what}, and at most {most:,} are accepted. Make it"
            " smaller."
        )


def enforceable(schema: Any) -> Any:
    """The same schema in a form that is enforced to the letter; raises Refusal where there is none."""
    for part in subschemas(schema):
        _check(part)
    return _Closing(without_endless(schema)).closed()


def subschemas(schema: Any) -> Iterator[dict]:
    """Every schema in a schema, itself first, wherever a $ref may find one."""
    if isinstance(schema, list):
        for part in schema:
            yield from subschemas(part)
    elif isinstance(schema, dict):
        yield schema | {"$ref": str(schema.get("$ref", ""))}
        for key, part in schema.items():
            for inner in _within(key, part):
                yield from subschemas(inner)


def _within(key: str, part: Any) -> list:
    if key in DATA:
        return []
    return list(part.values()) if key in MAPS and isinstance(part, dict) else [part]


def _check(schema: dict) -> None:
    asked, required = schema.get("minProperties"), schema.get("required", [])
    if isinstance(asked, (int, float)) and isinstance(required, list) and asked > max(1, len(required)):
        raise _refusal(f"minProperties {asked} may be met by writing one key twice: list as many keys as required,"
                       " or use checked_schema, which counts them")
    options = schema.get("x-guidance")
    if isinstance(options, dict) and any(options.get(name) for name in LENIENT):
        raise _refusal("x-guidance asks for leniency, and then its texts may break it")


class _Closing:
    """Spells out the keys that a schema leaves open."""

    def __init__(self, schema: Any):
        self._schema = schema
        self._names = names_together(schema)
        self._referred = any("additionalProperties" in part.get("$ref", "") for part in subschemas(schema))

    def closed(self) -> Any:
        return self._closed(self._schema)

    def _closed(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._closed(part) for part in schema]
        if not isinstance(schema, dict):
            return schema
        inner = tightened({key: self._within(key, part) for key, part in schema.items()})
        own = named(schema)
        names = list(dict.fromkeys([*own, *self._names.get(id(schema), [])]))
        open_ones = _leaves_keys_open(inner) or own and not self._referred and _can_tell_apart(inner, names)
        return self._with_other_keys_spelled(inner, names) if open_ones else inner

    def _within(self, key: str, part: Any) -> Any:
        if key in DATA:
            return part
        if key in MAPS and isinstance(part, dict):
            return {name: self._closed(inner) for name, inner in part.items()}
        return self._closed(part)

    def _with_other_keys_spelled(self, schema: dict, names: list[str]) -> dict:
        others = schema.get("additionalProperties", True)
        if schema.get("patternProperties"):
            raise _refusal(
                "patternProperties need additionalProperties false: a key spelled with escapes would pass them by"
            )
        if self._referred:
            raise _refusal("a $ref leads into additionalProperties: put that schema under $defs")
        if hidden := next((name for name in names if any(map(_is_control, name))), None):
            raise _refusal(
                f"the property {hidden!r} has a control character in its name, so additionalProperties have to be false"
            )
        told_apart = len(names) <= TOLD_APART or others not in (True, {})
        pattern = f"^{unlike(names)}$" if told_apart else f"^{ANY}*$"
        return _in_place(schema, {
            "properties": {name: (schema.get("properties") or {}).get(name, others) for name in names},
            "patternProperties": {pattern: others},
            "additionalProperties": False,
        })


def _in_place(schema: dict, keys: dict) -> dict:
    """The schema with these keywords side by side where the first of them was: llguidance reads the keywords before and
    after an allOf, anyOf, oneOf or $ref as schemas of their own, so that additionalProperties would forbid properties.
    """
    place = next(key for key in schema if key in (*keys, "required"))
    before, after = takewhile(lambda key: key != place, schema), dropwhile(lambda key: key != place, schema)
    return {**{key: schema[key] for key in before}, **keys,
            **{key: schema[key] for key in after if key not in keys}}


def _leaves_keys_open(schema: dict) -> bool:
    """Whether keys beside the named ones may follow, and some are named."""
    given = [schema.get(key) for key in ("properties", "patternProperties")]
    restricts = any(
        isinstance(names, dict) and any(part not in (True, {}) for part in names.values()) for names in given
    )
    others = schema.get("additionalProperties", True)
    return others is not False and (restricts or others not in (True, {}) and any(given))


def _can_tell_apart(schema: dict, names: list[str]) -> bool:
    """Whether keys beside the named ones may follow that can be kept apart from those."""
    return len(names) <= TOLD_APART and schema.get("additionalProperties", True) is not False and not (
        schema.get("patternProperties") or any(map(_is_control, "".join(names)))
    )


def _is_control(letter: str) -> bool:
    return letter < " " or letter == "\x7f"


def unlike(texts: list[str]) -> str:
    """A regular expression for every text that begins with none of these; the empty one excludes only itself."""
    return f"({_unlike([text for text in texts if text])})" + ("" if "" in texts else "?")


def _unlike(texts: list[str]) -> str:
    heads = sorted({text[0] for text in texts})
    ways = [f"[^{''.join(map(_letter, heads))}]{ANY}*" if heads else f"{ANY}+"]
    for head in heads:
        rests = [text[1:] for text in texts if text[0] == head]
        ways += [] if "" in rests else [f"{_letter(head)}({_unlike(rests)})?"]
    return "|".join(ways)


def _letter(letter: str) -> str:
    return f"\\x{{{ord(letter):X}}}"


def _refusal(reason: str) -> Refusal:
    return Refusal(f"The JSON Schema cannot be enforced to the letter: {reason}.")
