"""What a strategy hands back to its lane: rows, choices, sequences and requests, as the lane gave them."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from playground.decoding.requests import Request

Kind = TypeVar("Kind")


def handed_back(thing: object, kind: type[Kind]) -> Kind:
    """The same thing. Raises TypeError if it is not of the kind that a lane gives."""
    if isinstance(thing, kind):
        return thing
    hint = ": write `answer = yield lm.…`, the answer comes back from the yield" if isinstance(thing, Request) else ""
    raise TypeError(f"a lane takes back the {kind.__name__} that it gave, not {type(thing).__name__}{hint}")


def all_handed_back(things: Iterable[object], kind: type[Kind]) -> list[Kind]:
    """The same for several things."""
    return [handed_back(thing, kind) for thing in things]
