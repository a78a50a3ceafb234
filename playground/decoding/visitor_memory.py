"""What strategies remember between the runs of one visitor, who can clear it with a button.

A lane works on a copy and stores it when it ends. Parallel lanes therefore do not affect each other, and a run depends
only on the memory that the digest in its header identifies.
"""
from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from hashlib import blake2b
from typing import Protocol, TypeVar, cast


class Thing(Protocol):
    """An object that a strategy remembers; `digest` is equal for equal contents."""

    def digest(self) -> str: ...


Kind = TypeVar("Kind", bound=Thing)


class Memory:
    """Objects by name. The name includes everything they depend on: strategy, model, perhaps prompt and settings."""

    def __init__(self) -> None:
        self._things: dict[str, Thing] = {}

    def __len__(self) -> int:
        return len(self._things)

    def recall(self, name: str, make: Callable[[], Kind]) -> Kind:
        """A copy of the object with that name, or a new one."""
        return cast("Kind", deepcopy(self._things[name])) if name in self._things else make()

    def keep(self, name: str, thing: Thing) -> None:
        self._things[name] = thing

    def clear(self) -> None:
        self._things.clear()

    def digest(self) -> str:
        """Equal for equal contents; empty if nothing is stored."""
        if not self._things:
            return ""
        contents = "\n".join(f"{name} {thing.digest()}" for name, thing in sorted(self._things.items()))
        return blake2b(contents.encode(), digest_size=8).hexdigest()
