"""What each tier of the tests runs: parts that add up to the matrix, a case for every strategy, and marks rather than
substrings.
"""
from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
from registry import TOGGLES, registered

from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from support import marks, tiers
from support.durations import DurationRecorder
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


SAMPLERS = ("temperature", "top_k", "top_p", "min_p", "typical", "eta", "epsilon")
PAIRS = [Item(f"test_x.py::test_pairs[{a}-{b}]", {"both": (a, b)}, [pytest.mark.matrix.mark])
         for i, a in enumerate(SAMPLERS) for b in SAMPLERS[:i]]
SINGLE = Item("test_x.py::test_alone")


def by_tier(items: list[Item], tier: str = "full", part: int = 0, strategy: str | None = None) -> list[Item]:
    return chosen(items, tier, part, strategy)


# --- tiers ---

def test_the_parts_of_the_matrix_add_up_to_it_and_none_is_empty():
    parts = [list(tiers.in_part(PAIRS, part)) for part in range(PARTS)]
    assert Counter(item for part in parts for item in part) == Counter(PAIRS)


def test_a_case_keeps_its_part_whatever_else_is_collected():
    alone = [item for item in PAIRS if list(tiers.in_part([item], 0))]
    assert alone == list(tiers.in_part(PAIRS, 0))


def alone(function: str) -> list[Item]:
    """The cases of a function of the matrix that meets every strategy by itself."""
    return [Item(f"test_x.py::{function}[{name}]", {"name": name}, [pytest.mark.matrix.mark]) for name in marks.names()]


@pytest.mark.parametrize("part", range(0, PARTS, 7))
def test_in_every_part_a_strategy_meets_one_in_24_of_the_functions_of_the_matrix(part):
    functions = [f"test_{number}" for number in range(120)]
    kept = Counter(
        item.params["name"] for name in functions for item in by_tier(alone(name), "default", part)
    )
    assert set(kept) == marks.names()
    assert max(kept.values()) < 20 and 6 < sum(kept.values()) / len(kept) < 9  # one in 48 besides


def test_in_as_many_parts_as_there_are_turns_a_strategy_meets_every_function():
    cases = alone("test_y")
    kept = {item for part in range(tiers.TURNS) for item in by_tier(cases, "default", part)}
    assert kept == set(cases)


@pytest.mark.parametrize("part", range(PARTS))
def test_in_every_part_each_toggle_meets_every_kind_of_toggle(part):
    """Shown on all pairs of toggles there are, as `test_contract_toggles.py` makes them."""
    names = [cls.name for cls in registered(*TOGGLES)]
    pairs = list(combinations(names, 2))
    kept = tiers.Run("default", part).taken_pairs(pairs)
    met = {(a, find(b).kind) for both in kept for a, b in permutations(both)}
    assert met == {(a, find(b).kind) for a, b in permutations(names, 2)}
    assert len(kept) < len(pairs) / 6


def test_pairs_of_strategies_are_made_in_one_part_each_and_single_ones_in_every_part():
    pairs = list(combinations(SAMPLERS, 2))
    runs = [tiers.Run("default", part) for part in range(PARTS)]
    assert Counter(pair for run in runs for pair in pairs if run.takes(pair)) == Counter(pairs)
    assert all(run.takes([name]) for run in runs for name in SAMPLERS)


def test_the_full_run_makes_every_pair():
    pairs = list(combinations(SAMPLERS, 2))
    assert tiers.Run("full").taken_pairs(pairs) == pairs


def browser_item(name: str, *cases: int, marks: tuple[pytest.Mark, ...] = ()) -> list[Item]:
    """The cases of a test function with a browser."""
    return [Item(f"test_y.py::{name}[{case}]", {"case": case}, list(marks), ("page",)) for case in cases]


def test_the_parts_of_the_browser_tests_add_up_and_a_default_run_takes_one_case_of_a_function():
    items = [item for i in range(90) for item in browser_item(f"test_{i}", 1, 2)]
    parts = [by_tier(items, "default", part) for part in range(tiers.TURNS)]
    assert Counter(item for part in parts for item in part) == Counter(items[::2])
    assert all(parts)
    assert by_tier(items, "browser") == items


def test_what_visitors_do_on_every_visit_is_in_every_default_run():
    items = browser_item("test_run", 1, 2, marks=(pytest.mark.journey.mark,))
    assert all(by_tier(items, "default", part) == items for part in range(tiers.TURNS))


@pytest.mark.parametrize(("seconds", "kept"), [(0.05, 10), (0.3, tiers.PER_FUNCTION)])
def test_a_default_run_takes_all_cases_of_a_function_only_if_they_are_affordable(monkeypatch, seconds, kept):
    monkeypatch.setattr(tiers, "recorded", lambda: {"test_y.py::test_n": seconds})
    items = [Item(f"tests/test_y.py::test_n[{i}]", {"i": i}) for i in range(10)]
    assert by_tier(items, "default") == items[:kept]


def test_a_function_that_takes_long_keeps_a_case_for_every_strategy(monkeypatch):
    monkeypatch.setattr(tiers, "recorded", lambda: {"test_y.py::test_n": tiers.COSTLY / len(SAMPLERS)})
    items = [Item(f"test_y.py::test_n[{name}-{i}]", {"name": name}) for name in SAMPLERS for i in range(2)]
    kept = by_tier(items, "default")
    assert len(kept) == len(SAMPLERS) and {item.params["name"] for item in kept} == set(SAMPLERS)


def test_a_costly_function_runs_in_one_part_of_24_unless_a_strategy_is_judged_by_it(monkeypatch):
    monkeypatch.setattr(tiers, "recorded", lambda: {"test_y.py::test_n": 60.0, "test_y.py::test_m": 60.0})
    costly, judge = Item("test_y.py::test_n"), Item("test_y.py::test_m", {}, [pytest.mark.oracle("top_p").mark])
    runs = [by_tier([costly, judge], "default", part) for part in range(tiers.TURNS)]
    assert Counter(item for run in runs for item in run) == {costly: 1, judge: tiers.TURNS}


def test_cases_of_the_matrix_and_of_oracles_are_as_many_as_run_in_their_time_but_at_least_one(monkeypatch):
    names = ("test_y.py::test_quick", "test_y.py::test_long")
    monkeypatch.setattr(tiers, "recorded", lambda: dict(zip(names, (0.5, 60.0))))
    matrix, oracle = ([Item(f"{names[0]}[{i}]", {"i": i}, [mark]) for i in range(20 * PARTS)]
                      for mark in (pytest.mark.matrix.mark, pytest.mark.oracle("top_p").mark))
    assert len(by_tier(matrix, "default")) == tiers.MATRIX / 0.5
    assert by_tier(oracle, "default", part_without("test_quick")) == oracle[:2]
    long = [Item(f"{names[1]}[{i}]", {"i": i}, oracle[0].marks) for i in range(9)]
    assert by_tier(long, "default", part_without("test_long")) == long[:1]


def part_without(function: str) -> int:
    """A part in which a function does not have its turn."""
    return next(part for part in range(PARTS) if not tiers.has_turn([Item(f"test_y.py::{function}")], part))


def test_the_record_of_durations_has_the_mean_of_the_cases_and_keeps_functions_that_did_not_run(tmp_path):
    path = tmp_path / "durations.json"
    path.write_text('{"test_a.py::test_one": 9.0, "test_b.py::test_two": 5.0}')
    recorder = DurationRecorder(path)
    for nodeid, duration in [("tests/test_a.py::test_one[x]", 1.0), ("tests/test_a.py::test_one[x]", 0.5),
                             ("tests/test_a.py::test_one[y]", 2.0)]:
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=duration))
    recorder.pytest_sessionfinish()
    assert json.loads(path.read_text()) == {"test_a.py::test_one": 1.75, "test_b.py::test_two": 5.0}


def test_what_is_outside_the_matrix_is_in_every_default_run():
    assert all(SINGLE in by_tier([*PAIRS, SINGLE], "default", part) for part in range(PARTS))


def test_the_full_run_leaves_nothing_out():
    assert by_tier([*PAIRS, SINGLE], "full") == [*PAIRS, SINGLE]


def test_the_quick_run_leaves_out_benches_and_pages():
    bench, page = (
        Item("test_y.py::test_b", {}, [pytest.mark.bench.mark]),
        Item("test_y.py::test_p", fixturenames=("page",)),
    )
    assert by_tier([bench, SINGLE, page], "quick") == [SINGLE]


@pytest.mark.parametrize(("seconds", "kept"), [(0.01, tiers.PER_FUNCTION), (0.05, 2), (0.2, 1)])
def test_the_quick_run_takes_as_many_cases_of_a_function_as_run_in_its_time(monkeypatch, seconds, kept):
    monkeypatch.setattr(tiers, "recorded", lambda: {"test_y.py::test_n": seconds})
    items = [Item(f"test_y.py::test_n[{i}]", {"i": i}) for i in range(10)]
    assert by_tier(items, "quick") == items[:kept]


def test_the_quick_run_takes_a_part_of_the_functions_that_take_long(monkeypatch):
    functions = [f"test_y.py::test_{i}" for i in range(200)]
    monkeypatch.setattr(tiers, "recorded", lambda: dict.fromkeys(functions, 2.0))
    assert 0 < len(by_tier(list(map(Item, functions)), "quick")) < 20


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
