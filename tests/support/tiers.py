"""Which tests are run: all, a fixed part of what takes long, one representative each, or what concerns one strategy.

tests/README.md says what each tier is for.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from zlib import crc32

import pytest

from playground.contract import find
from support.durations import function_of, recorded
from support.marks import about, marked, names, parametrized

Items = list[pytest.Item]
PARTS = 48  # of the matrix, of which the default run takes one
TURNS = 24  # the default run takes one in so many of: functions with a browser, costly ones, and, for a strategy,
# functions of the matrix; the others in other parts
AFFORDABLE = 0.6  # seconds of a test function of which the default run takes all cases
COSTLY = 1.0  # seconds of a test function, after sampling, from which it runs in one of TURNS parts
MATRIX = 4.0  # seconds of a function of the matrix in the default run
QUICK = 0.1, 0.2  # seconds of a test function in the quick run, and those of a case from which it has to have its turn
PER_FUNCTION = 3  # cases of one test function that are run instead of all, where they are no strategies
PER_STRATEGY = 2  # cases of one test function that `--strategy` runs where only a parameter names the strategy
# files that make their cases from the registry
FOR_ALL = ("test_contract.py", "test_contract_toggles.py", "test_guarantees.py", "test_house.py")
# fixtures with a server or a browser behind them
PAGES = {"app", "address", "browser", "page", "visitor", "new_tab", "counted", "offloaded"}
SECONDS = {"page": 3.0, "bench": 1.5, "slow": 1.0, "matrix": 0.1, "any": 0.02}  # of a test that is not recorded yet
MODELS = ("architecture", "dtype", "pair")  # parameters that repeat a test on another network


@dataclass
class Run:
    """What this process runs, set before test files are imported: making all cases only to drop most takes a minute."""

    tier: str = "full"
    part: int = 0

    def takes(self, names: Sequence[str]) -> bool:
        """Whether cases are made that cross these strategies: in the full tier all, in the others those with one
        strategy alone, and a fixed part.
        """
        return self.tier == "full" or len(names) < 2 or crc32("+".join(names).encode()) % PARTS == self.part

    def taken_pairs(self, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """In the full tier all pairs of toggles; in the others a fixed part, and so many more that every toggle meets
        every kind of toggle.
        """
        met: set[tuple[str, str]] = set()
        found = {pair for pair in pairs if self.takes(pair)}
        for pair in sorted(pairs, key=lambda pair: crc32("+".join(pair).encode())) if self.tier != "full" else ():
            brought = {(name, find(other).kind) for name, other in permutations(pair)}
            if brought - met:
                found.add(pair)
            if pair in found:
                met |= brought
        return [pair for pair in pairs if pair in found]


RUN = Run()


def chosen(items: Items, tier: str, part: int, strategy: str | None) -> Items:
    """The collected items that a run of this tier selects, in their order if they are about one strategy."""
    if strategy:
        return about_strategy(items, strategy)
    kept = {"quick": quick, "default": lambda items: sampled(items, part), "browser": browser, "full": set}[tier](items)
    return longest_files_first([item for item in items if item in kept])


# --- the default: a part of what takes long ---

def sampled(items: Items, part: int) -> set[pytest.Item]:
    """One part of the matrix and of the tests with a browser, and of each other test function what is affordable."""
    return {item for group in by_function(items).values() for item in sampled_cases(group, part)}


def sampled_cases(cases: Items, part: int) -> Items:
    """What the default run takes of the cases of one test function."""
    if needs_page(cases[0]):
        return browser_cases(cases, part)
    if cases[0].get_closest_marker("matrix"):
        return within(MATRIX, [*in_part(cases, part), *representatives(cases, due(function_of(cases[0].nodeid), part))])
    if seconds(cases) <= AFFORDABLE:
        return cases
    kept = few(cases)
    if has_turn(cases, part):
        return kept
    return within(COSTLY, kept) if seconds(kept) <= COSTLY or is_judge(kept) else []


def within(limit: float, cases: Items) -> Items:
    """The first cases that take at most so many seconds together, at least one; all of a function take equally long."""
    return cases[:max(1, int(limit / max(expected_seconds(cases[0]), 1e-6)))] if cases else []


def seconds(cases: Items) -> float:
    return sum(map(expected_seconds, cases))


def is_judge(cases: Items) -> bool:
    """Whether this is what a strategy is judged by, which no run leaves out: an oracle, or a wrong variant."""
    return any(case.get_closest_marker(mark) for case in cases for mark in ("oracle", "refuses"))


def has_turn(cases: Items, part: int) -> bool:
    """Whether a function is in a part; it is in one of TURNS."""
    return crc32(function_of(cases[0].nodeid).encode()) % TURNS == part % TURNS


def browser_cases(cases: Items, part: int) -> Items:
    """One case of a function in one of TURNS parts; all cases if visitors meet it on every visit."""
    if cases[0].get_closest_marker("journey"):
        return cases
    return cases[:1] if has_turn(cases, part) else []


def in_part(items: Items, part: int) -> Iterator[pytest.Item]:
    """Each case is in exactly one of PARTS parts, independent of other cases."""
    return (item for item in items if turn(item) % PARTS == part)


def due(function: str, part: int) -> frozenset[str]:
    """The strategies that have to meet a function of the matrix in a part: one in TURNS, other ones in each part."""
    first = crc32(function.encode()) + part
    return frozenset(name for place, name in enumerate(sorted(names()), first) if place % TURNS == 0)


def representatives(items: Iterable[pytest.Item], wanted: frozenset[str] | None = None) -> Iterator[pytest.Item]:
    """Cases that together meet every strategy, or every wanted one; also every test that meets none. They are the first
    in `turn` order that bring something new.
    """
    met: set[str] = set()
    for item in sorted(items, key=turn):
        brought = about(item)
        new = brought - met if wanted is None else (brought - met) & wanted
        if not brought or new:
            met |= brought
            yield item


# --- quick: no matrix, no benches, no browser ---

def quick(items: Items) -> set[pytest.Item]:
    """One representative each: some strategies that a function meets, a network for every test of networks, a few of
    all else. Of the functions whose cases take long, a part.
    """
    light = [
        item for item in items if not any(map(item.get_closest_marker, ("bench", "slow"))) and not needs_page(item)
    ]
    most, costly = QUICK
    return {
        item
        for group in by_function(light).values()
        if expected_seconds(group[0]) <= costly or has_turn(group, 0)
        for item in within(most, few(on_one_network(group)))
    }


def few(items: Items) -> Items:
    """Of a test function made of strategies a case for each of them, of any other the first cases."""
    met = list(representatives(item for item in items if parametrized(item)))
    return met + [item for item in items if not parametrized(item)][:PER_FUNCTION]


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


# --- order and groups ---

def longest_files_first(items: Items) -> Items:
    """Workers take whole files, in this order: a long one that begins last would leave the other workers idle."""
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        seconds[item.path] += expected_seconds(item)
    return sorted(items, key=lambda item: -seconds[item.path])  # stable: a file's tests stay together, in their order


def expected_seconds(item: pytest.Item) -> float:
    """As recorded, or else roughly, on a quiet core."""
    known = recorded().get(function_of(item.nodeid))
    if known is not None:
        return known
    if needs_page(item):
        return SECONDS["page"]
    return max((SECONDS[mark.name] for mark in item.iter_markers() if mark.name in SECONDS), default=SECONDS["any"])


def by_function(items: Iterable[pytest.Item]) -> dict[str, Items]:
    found: dict[str, Items] = defaultdict(list)
    for item in items:
        found[item.nodeid.partition("[")[0]].append(item)
    return found


def turn(item: pytest.Item) -> int:
    """A hash that is the same on every machine."""
    return crc32(item.nodeid.encode())
