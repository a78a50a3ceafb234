"""Whether the schemas of a JSON Schema have finite documents, by a fixpoint over all of them and their references.

A required `next: {"$ref": "#"}` has none: every document would hold another one. The types of which a schema has a
document grow from none, as one schema after the other turns out to have some; what they would be if a document might be
endless shrinks from all. Types in the second and not in the first are lost to a circle of references.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from playground.errors import Refusal
from playground.grammar.schema.keywords import DATA, NAMED, escaped, located, reference

Types = frozenset[str]
NONE: Types = frozenset()
ALL: Types = frozenset(("null", "boolean", "number", "string", "array", "object"))
OF_VALUES = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array",
             dict: "object"}
TOGETHER = 40  # parts of allOf and references that are read as one schema
MOST_EXPLAINED = 1000  # schemas in a schema
SHOWN = 6  # places of a circle that a message names


class Lost(NamedTuple):
    """What a circle of references takes from the schema at a place: the types that stay, and all of `before`."""

    place: str
    types: Types
    before: Types


def lost_places(schema: Any) -> list[Lost]:
    """Every place where types are lost, in the order of the schema."""
    if not any("$ref" in part for _, part in located(schema)):
        return []  # nothing leads back
    graph = _Graph(schema)
    finite, endless = graph.fixpoint(NONE), graph.fixpoint(ALL)
    return [Lost(place, finite[place], endless[place]) for place in graph.parts if finite[place] != endless[place]]


def without_endless(schema: Any) -> Any:
    """The schema without the parts that have no finite document; raises Refusal, with the circle, if it has none."""
    lost = {each.place: each for each in lost_places(schema)}
    if "#" in lost and not lost["#"].types:
        raise Refusal(
            f"The JSON Schema cannot be used: no finite document fits it, since {_circle(schema, lost)} for ever. Let a"
            " property of this circle be optional, or null as well."
        )
    return _pruned(schema, "#", lost) if lost else schema


def endless_remarks(schema: Any) -> list[str]:
    """What is left out of a schema since it has no finite document, in sentences."""
    if sum(1 for _ in islice(located(schema), MOST_EXPLAINED + 1)) > MOST_EXPLAINED:
        return []  # the compiler process leaves them out all the same
    empty = [each.place for each in lost_places(schema) if not each.types]
    outer = [place for place in empty if not any(place.startswith(f"{other}/") for other in empty if other != place)]
    named = [place for place in outer if "/$defs/" not in place and "/definitions/" not in place] or outer
    return [f"{place[:80]} of the JSON Schema has no finite document and is left out." for place in named[:SHOWN]]


class _Graph:
    """The schemas by place, and what each needs of others."""

    def __init__(self, schema: Any):
        self.parts = dict(located(schema)) if isinstance(schema, dict) else {}
        self.together = {place: self._together(place) for place in self.parts}
        self.required = {place: {name for each in self.together[place] for name in _names(self.parts[each])}
                         for place in self.parts}
        self.items = {place: max(_least_items(self.parts[each]) for each in self.together[place])
                      for place in self.parts}

        self.counted = {place: any("minProperties" in self.parts[each] or "contains" in self.parts[each]
                                   for each in self.together[place]) for place in self.parts}

    def _together(self, place: str) -> list[str]:
        """The places that hold for every document of a place, through allOf and references."""
        found, waiting = {place: None}, [place]
        while waiting and len(found) < TOGETHER:
            part = self.parts[each := waiting.pop()]
            more = [reference(part), *(f"{each}/allOf/{i}" for i in range(len(_list(part, "allOf"))))]
            new = [other for other in more if other in self.parts and other not in found]
            found |= dict.fromkeys(new)
            waiting += new
        return list(found)

    def fixpoint(self, start: Types) -> dict[str, Types]:
        """The types of each schema; from NONE the least solution, from ALL the greatest."""
        found, places, changed = dict.fromkeys(self.parts, start), list(self.parts), True
        while changed:
            changed = False
            places.reverse()  # inner schemas first, and then those that refer to them
            for place in places:
                types = self._types(place, lambda other, part: self._of(other, part, found))
                changed |= types != found[place]
                found[place] = types
        return found

    def needed(self, place: str) -> Iterator[str]:
        """The places whose documents a document of a place may need."""
        for each in self.together[place]:
            yield from _needed(self.parts[each], each, self.required[place])

    def _of(self, place: str, part: Any, found: dict[str, Types]) -> Types:
        return found.get(place, NONE if part is False else ALL)

    def _types(self, place: str, of: Callable[[str, Any], Types]) -> Types:
        part = self.parts[place]
        types = _declared(part)
        if other := reference(part):
            types &= of(other, True)
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list):
                types &= frozenset().union(*(of(f"{place}/{key}/{i}", each) for i, each in enumerate(part[key])))
        for i, each in enumerate(_list(part, "allOf")):
            types &= of(f"{place}/allOf/{i}", each)
        required, count = self.required[place], self.items[place]
        if "object" in types and (required or self.counted[place]) and not all(
            _has_an_object(self.parts[each], each, of, required) for each in self.together[place]
        ):
            types -= {"object"}
        if "array" in types and (count or self.counted[place]) and not all(
            _has_an_array(self.parts[each], each, of, count) for each in self.together[place]
        ):
            types -= {"array"}
        return types


def _declared(part: dict) -> Types:
    """The types that `type`, `enum` and `const` leave."""
    listed = part.get("type", [])
    named = [listed] if isinstance(listed, str) else listed if isinstance(listed, list) else []
    types = frozenset("number" if name == "integer" else name for name in named if isinstance(name, str)) or ALL
    for values in (part.get("enum"), [part["const"]] if "const" in part else None):
        if isinstance(values, list):
            types &= frozenset(OF_VALUES[type(value)] for value in values)
    return types


def _names(part: dict) -> list[str]:
    return [name for name in _list(part, "required") if isinstance(name, str)]


def _least_items(part: dict) -> int:
    return int(part["minItems"]) if isinstance(part.get("minItems"), (int, float)) else 0


def _has_an_object(part: dict, place: str, of: Callable[[str, Any], Types], required: set[str]) -> bool:
    named = _map(part, "properties")
    declared = {name: of(f"{place}/properties/{escaped(name)}", each) for name, each in named.items()}
    others = of(f"{place}/additionalProperties", part.get("additionalProperties", True))
    patterns = [
        of(f"{place}/patternProperties/{escaped(name)}", each)
        for name, each in _map(part, "patternProperties").items()
    ]
    free = bool(others) or any(patterns)
    least = part.get("minProperties", 0)
    enough = free or not isinstance(least, (int, float)) or sum(map(bool, declared.values())) >= least
    return enough and all(bool(declared[name]) if name in declared else free for name in required)


def _has_an_array(part: dict, place: str, of: Callable[[str, Any], Types], count: int) -> bool:
    items = part.get("items", True)
    key = "items" if isinstance(items, list) else "prefixItems"
    found = [of(f"{place}/{key}/{i}", each) for i, each in enumerate(_list(part, key))]
    rest = of(f"{place}/items", items) if not isinstance(items, list) else ALL
    if not all(found[:count]) or count > len(found) and not rest:
        return False
    least_contained = part.get("minContains", 1)
    return "contains" not in part or least_contained == 0 or bool(of(f"{place}/contains", part["contains"]))


def _map(part: dict, key: str) -> dict:
    return part[key] if isinstance(part.get(key), dict) else {}


def _list(part: dict, key: str) -> list:
    return part[key] if isinstance(part.get(key), list) else []


def _pruned(part: Any, place: str, lost: dict[str, Lost]) -> Any:
    """The schema at a place with False for what has no finite document, and without types that have none."""
    if not isinstance(part, dict):
        return part
    if place in lost and not lost[place].types:
        return False
    kept = {key: _pruned_below(key, inner, f"{place}/{key}", lost) for key, inner in part.items()}
    return {**kept, "type": _left(part, lost[place].types)} if place in lost else kept


def _pruned_below(key: str, inner: Any, place: str, lost: dict[str, Lost]) -> Any:
    if key in DATA:
        return inner
    if isinstance(inner, list):
        return [_pruned(each, f"{place}/{i}", lost) for i, each in enumerate(inner)]
    if key in NAMED and isinstance(inner, dict):
        return {name: _pruned(each, f"{place}/{escaped(name)}", lost) for name, each in inner.items()}
    return _pruned(inner, place, lost)


def _left(part: dict, types: Types) -> list[str]:
    listed = part.get("type", sorted(ALL))
    named = [listed] if isinstance(listed, str) else listed
    return [name for name in named if ("number" if name == "integer" else name) in types]


def _circle(schema: Any, lost: dict[str, Lost]) -> str:
    """The places of a circle, from one to the next."""
    graph, path = _Graph(schema), ["#"]
    while path.count(path[-1]) < 2:
        path.append(next((place for place in graph.needed(path[-1]) if place in lost), path[-1]))
    circle = path[path.index(path[-1]):]
    shown = circle if len(circle) <= SHOWN else [*circle[:SHOWN - 1], "...", circle[-1]]
    return ", which needs ".join(place[:80] for place in shown).replace(", which needs ", " needs ", 1)


def _needed(part: dict, place: str, required: set[str]) -> Iterator[str]:
    if other := reference(part):
        yield other
    yield from (f"{place}/properties/{escaped(name)}" for name in sorted(required))
    yield f"{place}/additionalProperties"
    for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        yield from (f"{place}/{key}/{i}" for i in range(len(_list(part, key))))
    yield from (f"{place}/items", f"{place}/contains")
    yield from (f"{place}/{key}/{escaped(n)}" for key in ("properties", "patternProperties") for n in _map(part, key))
