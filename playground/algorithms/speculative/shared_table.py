"""A dictionary whose copies share their common entries."""
from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TypeVar

Key, Value = TypeVar("Key"), TypeVar("Value")


class SharedTable(MutableMapping[Key, Value]):
    """A dictionary without deletion. A deep copy is cheap: both share the entries so far, and each adds its own.

    Values are replaced, never modified. Shared entries are stored in layers, of which later ones take precedence.
    Layers of similar size are joined, so there are few of them, and an entry is moved once per doubling of the table.
    """

    def __init__(self) -> None:
        self._layers: tuple[dict[Key, Value], ...] = ()  # shared, so never changed
        self._own: dict[Key, Value] = {}
        self._count = 0

    def __getitem__(self, key: Key) -> Value:
        for layer in (self._own, *reversed(self._layers)):
            if key in layer:
                return layer[key]
        raise KeyError(key)

    def __setitem__(self, key: Key, value: Value) -> None:
        self._count += key not in self
        self._own[key] = value

    def __delitem__(self, key: Key) -> None:
        raise TypeError("entries are shared with copies and cannot be removed")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Key]:
        return iter({key: None for layer in (*self._layers, self._own) for key in layer})

    def __deepcopy__(self, memo: dict) -> SharedTable[Key, Value]:
        self._share()
        copy = SharedTable()
        copy._layers, copy._count = self._layers, self._count
        return copy

    def _share(self) -> None:
        """Turn own entries into a layer."""
        if self._own:
            layers, last = list(self._layers), self._own
            while layers and len(layers[-1]) <= 2 * len(last):
                last = layers.pop() | last
            self._layers, self._own = (*layers, last), {}
