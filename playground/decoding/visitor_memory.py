"""What strategies remember from one run of a visitor to the next. It belongs to that visitor alone, and a button clears
it.

A lane works on a copy and gives it back when it ends, so lanes that run side by side do not disturb each other, and a
run depends on nothing but what its header's digest names.
"""
from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from hashlib import blake2b
from typing import Protocol, TypeVar


class Thing(Protocol):
    """Anything a strategy wants to find again; `digest` is equal for equal contents."""

    def digest(self) -> str: ...


Kind = TypeVar("Kind", bound=Thing)


class Memory:
    """Things by name. A name says all that a thing is true of: strategy, model, perhaps prompt and settings."""

    def __init__(self) -> None:
        self._things: dict[str, Thing] = {}

    def __len__(self) -> int:
        return len(self._things)

    def recall(self, name: str, make: Callable[[], Kind]) -> Kind:
        """A copy of the thing of that name, or a fresh one."""
        return deepcopy(self._things[name]) if name in self._things else make()

    def keep(self, name: str, thing: Thing) -> None:
        self._things[name] = thing

    def clear(self) -> None:
        self._things.clear()

    def digest(self) -> str:
        """Equal for equal contents; empty where nothing is remembered."""
        if not self._things:
            return ""
        told = "\n".join(f"{name} {thing.digest()}" for name, thing in sorted(self._things.items()))
        return blake2b(told.encode(), digest_size=8).hexdigest()
