"""Which strategies a test is about: those its marks name, and those its parameters are made of."""
from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from playground.contract import Strategy, discover
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig

MARKS = ("strategy", "oracle", "refuses")  # pyproject.toml says what each means


def marked(item: pytest.Item, *kinds: str) -> set[str]:
    """Names in an item's marks of these kinds, by default all of them."""
    return {name for mark in item.iter_markers() if mark.name in (kinds or MARKS) for name in mark.args}


def parametrized(item: pytest.Item) -> set[str]:
    """Names of the strategies in an item's parameters."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {name for value in values for name in named_in(value)}


def about(item: pytest.Item) -> set[str]:
    """Names of all strategies that an item is about."""
    return marked(item) | parametrized(item)


@cache
def names() -> frozenset[str]:
    return frozenset(discover())


def named_in(value: Any) -> Iterator[str]:
    """Names of the strategies that a parameter is made of: a config, a lane of it, a class, or a name."""
    if isinstance(value, str):
        yield from [value] if value in names() else []
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from named_in(part)
    elif isinstance(value, type):
        yield from [value.name] if issubclass(value, Strategy) else []
    else:
        yield from _in_a_lane(value)


def _in_a_lane(value: Any) -> Iterator[str]:
    """Of two lanes that must agree, only the one that is tested counts."""
    value = getattr(value, "lane", value)
    if isinstance(value, LaneConfig):
        fillings = [knob for knob in value.knobs.values() if isinstance(knob, str)]
        yield from named_in([value.strategy, *fillings, *(name for name, _ in value.extras)])
    elif isinstance(value, Assembly):
        yield from (part.name for part in value.strategies())
    elif isinstance(value, Strategy):
        yield value.name
