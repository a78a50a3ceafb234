"""Which property names the schemas of one object have between them.

Through allOf, anyOf, oneOf and $ref several schemas may hold for the same object, and the grammar engine makes one of
them. Patterns for all keys but the named ones can then be joined only if they leave out the same names.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from playground.grammar.schema.keywords import located, reference

Others = Callable[[str, dict], Iterator[str]]
"""Further places whose schemas hold for objects of the schema at a place."""


def named(schema: dict) -> list[str]:
    """The keys that have a place of their own in a schema, which are written in this order."""
    required = schema.get("required")
    listed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    properties = schema.get("properties")
    return list(dict.fromkeys([*(properties if isinstance(properties, dict) else {}), *listed]))


def names_together(schema: Any) -> dict[int, list[str]]:
    """By the identity of every schema within, the names of all schemas that may hold for the same object."""
    groups = _Groups(dict(located(schema)))
    groups.join(_always, list(groups.parts))
    while groups.join(_one_of_several, groups.places_with_names()):
        pass
    return groups.names_of_parts()


class _Groups:
    """Schemas by place, in groups that grow together."""

    def __init__(self, parts: dict[str, dict]):
        self.parts = parts
        self._group = {place: [place] for place in parts}

    def join(self, others: Others, places: list[str]) -> bool:
        """Join the groups of these places with those of the places that `others` gives; returns whether there were
        any to join.
        """
        pairs = [(place, other) for place in places for other in others(place, self.parts[place])]
        return any([self._join(place, other) for place, other in pairs if other in self.parts])

    def places_with_names(self) -> list[str]:
        return [place for group, names in self._named() if names for place in group]

    def names_of_parts(self) -> dict[int, list[str]]:
        return {id(self.parts[place]): names for group, names in self._named() for place in group}

    def _named(self) -> Iterator[tuple[list[str], list[str]]]:
        """Each group with its names."""
        for group in {id(group): group for group in self._group.values()}.values():
            yield group, list(dict.fromkeys(name for place in group for name in named(self.parts[place])))

    def _join(self, place: str, other: str) -> bool:
        large, small = sorted((self._group[place], self._group[other]), key=len, reverse=True)
        if large is small:
            return False
        large += small
        self._group |= dict.fromkeys(small, large)
        return True


def _always(place: str, part: dict) -> Iterator[str]:
    """Places that hold for every object of a schema."""
    if other := reference(part):
        yield other
    yield from _listed(place, part, "allOf")


def _one_of_several(place: str, part: dict) -> Iterator[str]:
    for key in ("anyOf", "oneOf"):
        yield from _listed(place, part, key)


def _listed(place: str, part: dict, key: str) -> Iterator[str]:
    if isinstance(part.get(key), list):
        yield from (f"{place}/{key}/{number}" for number in range(len(part[key])))
