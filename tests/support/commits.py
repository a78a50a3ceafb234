"""Token ids of a run's commits."""
from __future__ import annotations

from collections.abc import Iterable

from playground.events import Commit, Event


def ids(events: Iterable[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Commit) for token in event.ids]
