"""Parts of a JSON Schema that no token mask enforces, decided on documents and on their beginnings.

`relaxed` leaves out what BESIDE lists, such as `not`, `if` and `uniqueItems`, and makes anyOf of oneOf: every document
of a schema is one of its relaxed form, which the grammar engine enforces. `SchemaJudge` decides the rest: True, False,
or None where what is still to come decides. False is final, whatever follows.

What the mask does not enforce has to be decided here completely, so keywords that this module does not know, such as
`pattern`, are refused in it, and left to the mask everywhere else.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from decimal import Decimal
from math import inf
from typing import Any

from playground.algorithms.constrained.partial_json import UNFINISHED, Open
from playground.errors import Refusal
from playground.grammar.schema.keywords import CHECKABLE, DATA
from playground.grammar.schema.subset import MAPS

BESIDE = tuple(CHECKABLE - {"oneOf"})  # left out of what the mask enforces
NOTES = frozenset(
    "title description $comment $schema $id $defs definitions default example examples deprecated readOnly writeOnly"
    " x-guidance".split()
)
TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "number": lambda value: is_number(value),
    "integer": lambda value: is_number(value) and value == int(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
SHAPES: dict[Callable[[Any], bool], str] = {
    lambda part: is_schema(part): "not if then else items additionalProperties"
    " contains propertyNames",
    lambda part: isinstance(part, list) and part != [] and all(map(is_schema, part)): "allOf anyOf oneOf prefixItems",
    lambda part: isinstance(part, dict) and all(map(is_schema, part.values())): "properties $defs definitions"
    " dependentSchemas",
    lambda part: is_number(part): "minimum maximum exclusiveMinimum exclusiveMaximum",
    lambda part: is_number(part) and part > 0: "multipleOf",
    lambda part: is_number(part) and part >= 0: "minLength maxLength minItems maxItems minProperties"
    " maxProperties minContains maxContains",
    lambda part: _is_names(part): "required",
    lambda part: all(isinstance(name, str) and name in TYPES for name in _listed(part)): "type",
    lambda part: isinstance(part, dict) and all(map(_is_names, part.values())): "dependentRequired",
    lambda part: isinstance(part, bool): "uniqueItems",
    lambda part: isinstance(part, list): "enum",
    lambda part: isinstance(part, str) and (part == "#" or part.startswith("#/")): "$ref",
}
WELL_FORMED = {key: holds for holds, keys in SHAPES.items() for key in keys.split()}
COUNTS = ("minProperties", "maxProperties")
WORDS = 64  # values and keys of a schema that a search tries as a whole
STEPS = 20_000  # schemas that one verdict may read
Truth = bool | None


def is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def all_of(verdicts: Iterable[Truth]) -> Truth:
    """Whether all hold; False as soon as one does not."""
    found = list(verdicts)
    return False if False in found else None if None in found else True


def any_of(verdicts: Iterable[Truth]) -> Truth:
    return negated(all_of(map(negated, verdicts)))


def negated(verdict: Truth) -> Truth:
    return None if verdict is None else not verdict


def one_of(verdicts: Iterable[Truth]) -> Truth:
    """Whether exactly one holds."""
    found = list(verdicts)
    if found.count(True) > 1:
        return False
    return None if None in found else found.count(True) == 1


def same(one: Any, other: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, and not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def complete(value: Any) -> bool:
    """Whether nothing may follow inside a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not isinstance(value, Open) and value is not UNFINISHED and all(map(complete, inner))


def needs_judging(schema: Any) -> bool:
    """Whether a schema contains anything that the mask may not enforce; a $ref may lead to it."""
    return isinstance(schema, dict) and (
        any(key in schema for key in (*BESIDE, "oneOf", "$ref"))
        or counts_keys(schema)
        or any(map(needs_judging, _inner(schema)))
    )


def _inner(schema: dict) -> list[Any]:
    found = []
    for key, part in schema.items():
        if key in MAPS and isinstance(part, dict):
            found += part.values()
        elif key not in DATA and key != "dependentRequired":
            found += part if isinstance(part, list) else [part]
    return found


def relaxed(schema: Any) -> Any:
    """A schema that the grammar engine may enforce, of which every document of this one is a document."""
    if isinstance(schema, list):
        return [relaxed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "oneOf" in schema and "anyOf" in schema:
        raise _refusal("oneOf beside anyOf in one schema cannot be checked: put one of them into allOf")
    found, schema = {}, _with_listed_names(schema)
    for key, part in schema.items():
        if key in BESIDE or key in COUNTS and counts_keys(schema):
            continue
        name = "anyOf" if key == "oneOf" else key
        maps = key in MAPS and isinstance(part, dict)
        found[name] = {k: relaxed(v) for k, v in part.items()} if maps else part if key in DATA else relaxed(part)
    return found


def _with_listed_names(schema: dict) -> dict:
    """Where `propertyNames` lists the names, they are the properties: a mask then begins no other key."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or not _is_names(names.get("enum")) or "patternProperties" in schema:
        return schema
    declared, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    properties = {name: declared.get(name, others) for name in dict.fromkeys([*declared, *names["enum"]])}
    return schema | {
        "properties": {name: part for name, part in properties.items() if name in names["enum"]},
        "additionalProperties": False,
    }


class SchemaJudge:
    """Decides values under one schema. `check` raises Refusal for a schema that cannot be decided."""

    def __init__(self, schema: dict):
        self.schema, self._steps = schema, 0
        self._keywords: dict[str, Callable[[Any, Any, dict], Truth]] = {
            "type": lambda part, value, schema: any(TYPES[name](value) for name in _listed(part)),
            "enum": lambda part, value, schema: self._equal(part, value),
            "const": lambda part, value, schema: self._equal([part], value),
            "minimum": _on(is_number, lambda part, value: value >= part),
            "maximum": _on(is_number, lambda part, value: value <= part),
            "exclusiveMinimum": _on(is_number, lambda part, value: value > part),
            "exclusiveMaximum": _on(is_number, lambda part, value: value < part),
            "multipleOf": _on(is_number, lambda part, value: Decimal(str(value)) % Decimal(str(part)) == 0),
            "minLength": _on(TYPES["string"], lambda part, value: len(value) >= part),
            "maxLength": _on(TYPES["string"], lambda part, value: len(value) <= part),
            "allOf": lambda part, value, schema: all_of(self._each(part, value)),
            "anyOf": lambda part, value, schema: any_of(self._each(part, value)),
            "oneOf": lambda part, value, schema: one_of(self._each(part, value)),
            "not": lambda part, value, schema: negated(self.verdict(part, value)),
            "if": self._condition,
            "dependentSchemas": self._dependent_schemas,
            "$ref": lambda part, value, schema: self.verdict(self._target(part), value),
        }
        self._inside: dict[str, Callable[[Any, Any, bool, dict], Truth]] = {
            "minItems": _at_least(list), "maxItems": _at_most(list),
            "minProperties": _at_least(dict), "maxProperties": _at_most(dict),
            "uniqueItems": self._unique, "items": self._items, "prefixItems": self._prefix_items,
            "required": self._required, "properties": self._properties,
            "additionalProperties": self._additional, "propertyNames": self._property_names,
            "dependentRequired": self._dependent_required, "contains": self._contains,
        }

    def check(self) -> None:
        self._check(self.schema, "", set())

    def _check(self, schema: Any, within: str, seen: set[tuple[int, bool]]) -> None:
        """Raise Refusal for a keyword that would have to be decided and cannot be; `within` is empty where the mask
        enforces the schema.
        """
        if not isinstance(schema, dict) or (id(schema), bool(within)) in seen:
            return
        seen.add((id(schema), bool(within)))
        known = NOTES | {"then", "else", "minContains", "maxContains"} | self._keywords.keys() | self._inside.keys()
        if within and (strange := next((key for key in schema if key not in known), None)):
            raise _refusal(
                f"{strange} within {within} cannot be checked beside the mask, so nothing could be guaranteed"
            )
        for key, part in schema.items():
            if key in WELL_FORMED and not WELL_FORMED[key](part):
                raise _refusal(f"the value of {key} is not what draft 2020-12 asks for")
            decided = key in (*BESIDE, "oneOf") or key == "anyOf" and any(map(needs_judging, part))
            for inner in [self._target(part)] if key == "$ref" and within else _inner({key: part}):
                self._check(inner, within or (key if decided else ""), seen)

    def judge(self, value: Any) -> Truth:
        """Whether a document satisfies the schema; None where what follows decides."""
        self._steps = 0
        return self.verdict(self.schema, value)

    def verdict(self, schema: Any, value: Any) -> Truth:
        """The same for a value and a schema within."""
        self._steps += 1
        if self._steps > STEPS:
            raise _refusal("it is too large, or leads back to itself too often, to be checked")
        if isinstance(schema, bool) or value is UNFINISHED:
            return schema if isinstance(schema, bool) else None
        return all_of(self._keyword(key, part, value, schema) for key, part in schema.items())

    def _keyword(self, key: str, part: Any, value: Any, schema: dict) -> Truth:
        bare = value.value if isinstance(value, Open) else value
        if key in self._inside:
            return self._inside[key](part, bare, isinstance(value, Open), schema)
        if key not in self._keywords:
            return True  # a note, or what the mask enforces
        return self._keywords[key](part, bare if key == "type" else value, schema)

    def _each(self, schemas: list, value: Any) -> list[Truth]:
        return [self.verdict(schema, value) for schema in schemas]

    def _equal(self, listed: list, value: Any) -> Truth:
        return any(same(value, each) for each in listed) if complete(value) else None

    def _condition(self, part: Any, value: Any, schema: dict) -> Truth:
        holds = self.verdict(part, value)
        then, otherwise = (self.verdict(schema.get(key, True), value) for key in ("then", "else"))
        return any_of([all_of([holds, then]), all_of([negated(holds), otherwise])])

    def _unique(self, part: bool, value: Any, growing: bool, schema: dict) -> Truth:
        if not part or not isinstance(value, list):
            return True
        whole = [item for item in value if complete(item)]
        if any(same(whole[i], whole[j]) for i in range(len(whole)) for j in range(i)):
            return False
        return None if growing or len(whole) < len(value) else True

    def _contains(self, part: Any, value: Any, growing: bool, schema: dict) -> Truth:
        if not isinstance(value, list):
            return True
        found = [self.verdict(part, item) for item in value]
        least, most = schema.get("minContains", 1), schema.get("maxContains", len(value) if not growing else inf)
        if found.count(True) > most or not growing and len(found) - found.count(False) < least:
            return False
        settled = most == inf if growing else None not in found
        return True if settled and found.count(True) >= least else None

    def _dependent_required(self, part: dict, value: Any, growing: bool, schema: dict) -> Truth:
        if not isinstance(value, dict):
            return True
        found = [self._required(names, value, growing, schema) for key, names in part.items() if key in value]
        return all_of([*found, None if growing else True])

    def _dependent_schemas(self, part: dict, value: Any, schema: dict) -> Truth:
        inner, growing = (value.value, True) if isinstance(value, Open) else (value, False)
        if not isinstance(inner, dict):
            return True
        found = [self.verdict(each, value) for key, each in part.items() if key in inner]
        return all_of([*found, None if growing else True])

    def _property_names(self, part: Any, value: Any, growing: bool, schema: dict) -> Truth:
        if not isinstance(value, dict):
            return True
        return all_of([*(self.verdict(part, key) for key in value), None if growing else True])

    def _items(self, part: Any, value: Any, growing: bool, schema: dict) -> Truth:
        if not isinstance(value, list):
            return True
        rest = value[len(schema.get("prefixItems", ())):]
        return all_of([*(self.verdict(part, item) for item in rest), None if growing else True])

    def _prefix_items(self, part: list, value: Any, growing: bool, schema: dict) -> Truth:
        if not isinstance(value, list):
            return True
        found = [self.verdict(each, item) for each, item in zip(part, value)]
        return all_of([*found, None if growing else True])

    def _required(self, part: list, value: Any, growing: bool, schema: dict) -> Truth:
        if not isinstance(value, dict) or all(key in value for key in part):
            return True
        return None if growing else False

    def _properties(self, part: dict, value: Any, growing: bool, schema: dict) -> Truth:
        if not isinstance(value, dict):
            return True
        found = [self.verdict(part[key], item) for key, item in value.items() if key in part]
        return all_of([*found, None if growing else True])

    def _additional(self, part: Any, value: Any, growing: bool, schema: dict) -> Truth:
        if not isinstance(value, dict) or "patternProperties" in schema:
            return True
        named = schema.get("properties", {})
        found = [self.verdict(part, item) for key, item in value.items() if key not in named]
        return all_of([*found, None if growing else True])

    def broken(self, value: Any) -> str:
        """The keyword that a document, or the beginning of one, breaks for good; empty if it breaks none."""
        self._steps = 0
        return self._broken(self.schema, value)

    def _broken(self, schema: Any, value: Any) -> str:
        bare = value.value if isinstance(value, Open) else value
        for key, part in schema.items() if isinstance(schema, dict) else ():
            if self._keyword(key, part, value, schema) is not False:
                continue
            inner = [(self._target(part), value)] if key == "$ref" else []
            if key == "properties" and isinstance(bare, dict):
                inner = [(part[name], item) for name, item in bare.items() if name in part]
            if key == "items" and isinstance(bare, list):
                inner = [(part, item) for item in bare]
            return next((found for each, item in inner if (found := self._broken(each, item))), key)
        return ""

    def _target(self, name: str) -> Any:
        """What a $ref such as #/$defs/a leads to; raises Refusal where that is no schema."""
        found: Any = self.schema
        for step in name.removeprefix("#").split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if not is_schema(found):
            raise _refusal(f"the $ref {name[:40]!r} leads nowhere")
        return found


def counts_keys(schema: dict) -> bool:
    """Whether a schema counts keys in a way that no mask enforces: those it lists are not all required, or it asks for
    more than it requires, where a key may be written twice.
    """
    counts = [schema[key] for key in COUNTS if is_number(schema.get(key))]
    required, listed = _list_in(schema, "required"), schema.get("properties")
    optional = isinstance(listed, dict) and any(name not in required for name in listed)
    asked = schema.get("minProperties")
    return bool(counts) and (optional or is_number(asked) and asked > max(1, len(required)))


def words_of(schema: Any) -> list[str]:
    """The values and keys that a schema speaks of, as JSON, each once."""
    found: dict[str, None] = {}
    waiting = [schema]
    while waiting and len(found) < WORDS:
        part = waiting.pop(0)
        if isinstance(part, dict):
            values = [*_list_in(part, "enum"), *([part["const"]] if "const" in part else [])]
            found |= dict.fromkeys(json.dumps(value, ensure_ascii=False) for value in values)
            properties = part.get("properties")
            keys = [*_list_in(part, "required"), *(properties if isinstance(properties, dict) else ())]
            found |= dict.fromkeys(f"{json.dumps(key, ensure_ascii=False)}: " for key in keys)
            waiting += _inner(part)
    return list(found)[:WORDS]


def _list_in(schema: dict, key: str) -> list:
    return schema[key] if isinstance(schema.get(key), list) else []


def _listed(part: Any) -> list:
    return part if isinstance(part, list) else [part]


def _on(applies: Callable[[Any], bool], holds: Callable[[Any, Any], bool]) -> Callable[..., Truth]:
    return lambda part, value, schema: not applies(value) or holds(part, value)


def _at_least(kind: type) -> Callable[..., Truth]:
    def holds(part: int, value: Any, growing: bool, schema: dict) -> Truth:
        return True if not isinstance(value, kind) or len(value) >= part else None if growing else False
    return holds


def _at_most(kind: type) -> Callable[..., Truth]:
    def holds(part: int, value: Any, growing: bool, schema: dict) -> Truth:
        if not isinstance(value, kind):
            return True
        return False if len(value) > part else None if growing else True
    return holds


def _refusal(reason: str) -> Refusal:
    return Refusal(f"The JSON Schema cannot be enforced to the letter: {reason}.", "source")
