"""Which tests are run: all, all but the crossings and pages of another part, or what concerns one strategy.

The rule of each tier is a sentence in tests/README.md. It depends on marks, fixtures and names, never on durations.
"""
from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from zlib import crc32

import pytest

from support.marks import about, marked, parametrized

Items = list[pytest.Item]
# Crossings and most tests with a browser run in one part each. Eleven, and three hours for each: landings at any
# regular interval that is no multiple of 33 hours go through all parts in eleven landings.
PARTS, HOURS = 11, 3
ALWAYS = ("journey", "security", "oracle", "refuses")  # marks of what every default run takes
PER_FUNCTION = 3  # cases of one test function in the quick run, where they are no strategies
PER_STRATEGY = 2  # cases of one test function that `--strategy` runs where only a parameter names the strategy
# files that make their cases from the registry
FOR_ALL = ("test_contract.py", "test_contract_toggles.py", "test_guarantees.py", "test_house.py")
# fixtures with a server or a browser behind them
PAGES = {"app", "address", "browser", "page", "visitor", "new_tab", "counted", "offloaded"}
MODELS = ("architecture", "dtype", "pair")  # parameters that repeat a test on another network


def chosen(items: Items, tier: str, part: int, strategy: str | None) -> Items:
    """The collected items that a run of this tier selects, in their order."""
    if strategy:
        return about_strategy(items, strategy)
    kept = {"quick": quick, "default": lambda items: default(items, part), "browser": browser, "full": set}[tier](items)
    return [item for item in items if item in kept]


# --- the default: everything, but crossings and pages in turn ---

def part_of_today() -> int:
    """The part whose turn it is by the date of the last commit; 0 where there is no repository."""
    asked = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=Path(__file__).parent, capture_output=True)
    return int(asked.stdout or 0) // (HOURS * 3600) % PARTS


def default(items: Items, part: int) -> set[pytest.Item]:
    """What is neither of the matrix nor with a browser, what is marked to run always, and a part of the rest."""
    always = {item for item in items if not rotates(item)}
    return always | {item for item in items if turn(item) % PARTS == part} | guaranteed(items)


def rotates(item: pytest.Item) -> bool:
    """Whether a test runs in its turn only."""
    rotating = item.get_closest_marker("matrix") or needs_page(item)
    return bool(rotating) and not any(map(item.get_closest_marker, ALWAYS))


def guaranteed(items: Items) -> set[pytest.Item]:
    """Of each test function of a guarantee a case for every strategy it meets."""
    functions = by_function(item for item in items if item.get_closest_marker("guarantee"))
    return {item for cases in functions.values() for item in representatives(cases)}


def representatives(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases that together meet every strategy: the first in `turn` order that bring a new one."""
    met: set[str] = set()
    for item in sorted(items, key=turn):
        if brought := about(item) - met:
            met |= brought
            yield item


# --- quick: no matrix, no benches, no browser ---

def quick(items: Items) -> set[pytest.Item]:
    """Of each test function that takes neither a bench nor seconds nor a page: a case for every strategy that its cases
    are made of, on one network; where they are made of none, or cross strategies, the first few.
    """
    light = [
        item for item in items if not any(map(item.get_closest_marker, ("bench", "slow"))) and not needs_page(item)
    ]
    return {item for cases in by_function(light).values() for item in few(on_one_network(cases))}


def few(cases: Items) -> Items:
    """A case for each strategy; of a crossing, and where there is no strategy, the first cases."""
    if cases and cases[0].get_closest_marker("matrix"):
        return sorted(cases, key=turn)[:PER_FUNCTION]
    met = list(representatives(item for item in cases if parametrized(item)))
    return met + [item for item in cases if not parametrized(item)][:PER_FUNCTION]


def browser(items: Items) -> set[pytest.Item]:
    """Every test with a browser."""
    return {item for item in items if needs_page(item)}


def needs_page(item: pytest.Item) -> bool:
    return bool(PAGES & set(getattr(item, "fixturenames", ())))


def on_one_network(items: Items) -> Items:
    """The cases that have the first of the values of a parameter that only names the network."""
    for name in MODELS:
        values = [
            item.callspec.params[name] for item in items if hasattr(item, "callspec") and name in item.callspec.params
        ]
        items = [item for item in items if not values or item.callspec.params[name] == values[0]]
    return items


# --- what concerns one strategy ---

def concerns(path: Path, name: str) -> bool:
    """Whether a test file can hold tests about a strategy. This only spares the import of the others: what is run is
    chosen by marks.
    """
    return path.name in FOR_ALL or f'"{name}"' in path.read_text(encoding="utf-8")


def about_strategy(items: Items, name: str) -> Items:
    """All tests whose marks name the strategy, and some of each test function that meets it in a parameter."""
    own = {item for item in items if name in marked(item)}
    met = [item for item in items if item not in own and name in parametrized(item) and not needs_page(item)]
    some = {item for group in by_function(met).values() for item in sorted(group, key=plainest)[:PER_STRATEGY]}
    return [item for item in items if item in own or item in some]


def plainest(item: pytest.Item) -> tuple[int, int]:
    """Sort key: cases with few other strategies first."""
    return len(parametrized(item)), turn(item)


# --- groups and turns ---

def by_function(items: Iterable[pytest.Item]) -> dict[str, Items]:
    found: dict[str, Items] = defaultdict(list)
    for item in items:
        found[item.nodeid.partition("[")[0]].append(item)
    return found


def turn(item: pytest.Item) -> int:
    """A hash that is the same on every machine, whatever else is collected."""
    return crc32(item.nodeid.encode())
