"""What each tier of the tests runs: everything but crossings and pages, which have their turn, and marks rather than
substrings.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest

from playground.contract.lane_config import LaneConfig, assemble
from support import marks, tiers
from support.tiers import PARTS, chosen


@dataclass(eq=False)
class Item:
    """What the choice looks at of a collected test."""

    nodeid: str
    params: dict[str, Any] = field(default_factory=dict)
    marks: list[pytest.Mark] = field(default_factory=list)
    fixturenames: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return Path(self.nodeid.partition("::")[0])

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=self.params)

    def iter_markers(self) -> list[pytest.Mark]:
        return self.marks

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)


MATRIX = pytest.mark.matrix.mark
SAMPLERS = ("temperature", "top_k", "top_p", "min_p", "typical", "eta", "epsilon")
PAIRS = [Item(f"test_x.py::test_pairs[{a}-{b}]", {"both": (a, b)}, [MATRIX])
         for i, a in enumerate(SAMPLERS) for b in SAMPLERS[:i]]
SINGLE = Item("test_x.py::test_alone")


def browser_item(name: str, *cases: int, marks: tuple[pytest.Mark, ...] = ()) -> list[Item]:
    """The cases of a test function with a browser."""
    return [Item(f"test_y.py::{name}[{case}]", {"case": case}, list(marks), ("page",)) for case in cases]


def by_tier(items: list[Item], tier: str = "full", part: int = 0, strategy: str | None = None) -> list[Item]:
    return chosen(items, tier, part, strategy)


# --- the default run ---

@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_neither_a_crossing_nor_a_page_is_in_every_default_run(part):
    slow = Item("test_x.py::test_slow", {}, [pytest.mark.slow.mark, pytest.mark.bench.mark])
    kept = by_tier([*PAIRS, SINGLE, slow, *browser_item("test_page", 1)], "default", part)
    assert {SINGLE, slow} <= set(kept)


def test_crossings_and_pages_run_in_one_part_each_and_none_is_empty():
    rotating = [*PAIRS, *(item for i in range(90) for item in browser_item(f"test_{i}", 1, 2))]
    parts = [by_tier(rotating, "default", part) for part in range(PARTS)]
    assert Counter(item for part in parts for item in part) == Counter(rotating)
    assert all(parts)


def test_a_case_keeps_its_part_whatever_else_is_collected():
    assert [item for item in PAIRS if by_tier([item], "default", 3)] == by_tier(PAIRS, "default", 3)


@pytest.mark.parametrize("mark", tiers.ALWAYS)
def test_journeys_attacks_oracles_and_wrong_variants_are_in_every_default_run(mark):
    marked = getattr(pytest.mark, mark)("top_p").mark
    items = browser_item("test_run", 1, 2, marks=(marked,)) + [Item("test_x.py::test_m", {}, [marked, MATRIX])]
    assert all(by_tier(items, "default", part) == items for part in range(PARTS))


@pytest.mark.parametrize("part", range(PARTS))
def test_in_every_default_run_each_strategy_is_tested_for_its_guarantee(part):
    cases = [Item(f"test_x.py::test_law[{name}-{i}]", {"name": name}, [pytest.mark.guarantee.mark, MATRIX])
             for name in SAMPLERS for i in range(20)]
    kept = by_tier(cases, "default", part)
    assert {item.params["name"] for item in kept} == set(SAMPLERS) and len(kept) < len(cases) / 3


@pytest.mark.parametrize("every", [3, 6, 12, 24, 48, 168])
def test_landings_at_a_regular_interval_go_through_all_parts_in_as_many_landings(monkeypatch, every):
    def landed(hours: int) -> int:
        monkeypatch.setattr(tiers.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=b"%d" % (hours * 3600)))
        return tiers.part_of_today()

    assert {landed(495_000 + every * landing) for landing in range(PARTS)} == set(range(PARTS))


def test_outside_a_repository_the_first_part_runs(monkeypatch):
    monkeypatch.setattr(tiers.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=b""))
    assert tiers.part_of_today() == 0


# --- full, browser, quick ---

def test_the_full_run_leaves_nothing_out():
    assert by_tier([*PAIRS, SINGLE], "full") == [*PAIRS, SINGLE]


def test_the_browser_run_takes_all_pages():
    pages = browser_item("test_p", 1, 2)
    assert by_tier([*PAIRS, SINGLE, *pages], "browser") == pages


def test_the_quick_run_leaves_out_benches_pages_and_what_takes_seconds():
    left_out = [Item("test_y.py::test_b", {}, [getattr(pytest.mark, mark).mark]) for mark in ("bench", "slow")]
    assert by_tier([*left_out, SINGLE, *browser_item("test_p", 1)], "quick") == [SINGLE]


def test_the_quick_run_takes_a_case_for_each_strategy_and_a_few_where_there_is_none():
    strategies = [Item(f"test_y.py::test_n[{name}-{i}]", {"name": name}) for name in SAMPLERS for i in range(2)]
    numbers = [Item(f"test_y.py::test_m[{i}]", {"i": i}) for i in range(10)]
    kept = by_tier([*strategies, *numbers], "quick")
    assert Counter(item.params.get("name") for item in kept) == Counter([*SAMPLERS, *[None] * tiers.PER_FUNCTION])


def test_the_quick_run_takes_a_few_cases_of_a_crossing():
    assert len(by_tier(PAIRS, "quick")) == tiers.PER_FUNCTION


def test_the_quick_run_takes_one_network():
    items = [
        Item(f"test_y.py::test_n[{name}-{i}]", {"architecture": name, "i": i})
        for name in ("llama", "gpt2")
        for i in range(2)
    ]
    assert by_tier(items, "quick") == items[:2]


# --- one strategy ---

def test_a_strategy_is_chosen_by_its_marks_and_not_by_a_substring():
    marked = Item("test_y.py::test_nucleus", {}, [pytest.mark.oracle("top_p").mark])
    like = Item("test_y.py::test_top_p_like_words")
    assert by_tier([marked, like], strategy="top_p") == [marked]
    assert by_tier([marked, like], strategy="top_k") == []


@pytest.mark.parametrize("mark", marks.MARKS)
def test_each_kind_of_mark_names_strategies(mark):
    item = Item("test_y.py::test_two", {}, [getattr(pytest.mark, mark)("top_p", "top_k").mark])
    assert marks.about(item) == {"top_p", "top_k"}


def test_a_strategy_meets_a_few_cases_of_the_matrix_and_no_page():
    page = Item("test_y.py::test_page[top_p]", {"name": "top_p"}, fixturenames=("page",))
    kept = by_tier([*PAIRS, page], strategy="top_p")
    assert len(kept) == tiers.PER_STRATEGY and all("top_p" in item.params["both"] for item in kept)


@pytest.mark.parametrize(
    "value, names",
    [
        ("top_p", {"top_p"}),
        ("a prompt", set()),
        (3, set()),
        (
            LaneConfig("speculative", {}, [("draft_model", {}), ("rejection", {})]),
            {"speculative", "draft_model", "rejection"},
        ),
        (assemble(LaneConfig("greedy", {}, [("top_p", {})])), {"greedy", "top_p"}),
        (("top_k", {"k": 1}), {"top_k"}),
    ],
)
def test_parameters_name_the_strategies_they_are_made_of(value, names):
    assert set(marks.named_in(value)) == names


def test_an_unknown_strategy_is_refused_with_names_that_are_near():
    config = SimpleNamespace(getoption=lambda name: "topp" if name == "strategy" else None)
    with pytest.raises(pytest.UsageError, match="no strategy named 'topp'. Did you mean top_p"):
        conftest.pytest_configure(config)
