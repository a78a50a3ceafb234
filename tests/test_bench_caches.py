"""The cache policies are compared at equal budgets, and the memory they promise to free with what they hold."""
from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from playground.bench.caches.caches_defaults import NEAR, SLOWER
from playground.bench.caches.caches_report import Findings
from playground.bench.caches.freed_memory import (
    Freed,
    MemoryRequest,
    MemoryResult,
    MemoryUse,
    allocated,
    freed,
    measure,
    tensors,
)
from playground.bench.caches.freed_memory import rows as memory_rows
from playground.bench.caches.memory_ranking import CLAIMS, claim_rows, places, ranking_rows
from playground.bench.caches.policy_configs import FULL, Point, default_points, full_cache, points_at_budget, policies
from playground.bench.caches.policy_lane import PolicyLane, random_model, some_tokens
from playground.bench.caches.recall_score import BudgetedEntrant, Measured, RecallTrial, chart, questions
from playground.bench.caches.renewed_page import measured_in
from playground.bench.caches.step_timing import AGAIN, StepRatio, StepTimes, TimedLanes, ratios
from playground.bench.charts import Chart, below
from playground.bench.survey.results import Score
from playground.cli import main
from playground.contract import Full, Quantises, SelectsPerRow, find, make
from playground.decoding.models import Models

pytestmark = pytest.mark.bench

PROMPT, KEPT, WRITTEN = 240, 48, 12
SVG = "{http://www.w3.org/2000/svg}"
BY_TOKENS = [cls.name for cls in policies() if cls.knobs_for_budget(KEPT, PROMPT) is not None]
PACKING = [cls.name for cls in policies() if issubclass(cls, Quantises)]
ALL_LAYERS = {"turboquant": {"whole": 0}}  # of the policies that leave some as they are


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", 512)


def driven(point: Point, model, tokens: int = WRITTEN) -> PolicyLane:
    """A lane that has read the prompt and this many tokens after it."""
    lane = PolicyLane(point, model, some_tokens(model, PROMPT), tokens)
    lane.prefill()
    for _ in range(tokens):
        lane.step()
    return lane


def held_share(lane: PolicyLane, model) -> float:
    """Of a full cache's slots, those that hold a token."""
    return lane.store.live_slots() / (lane.store.length * model.depth * lane.store.heads)


# --- equal budgets ---

@pytest.mark.parametrize("name", [name for name in BY_TOKENS if not issubclass(find(name), SelectsPerRow)])
def test_a_policy_with_a_token_budget_holds_exactly_that_many(name, model):
    """Over layers and heads, give or take a token. Those under which every row chooses for itself hold more than it
    looks at.
    """
    lane = driven(Point(name, name, find(name).knobs_for_budget(KEPT, PROMPT)), model, 1)
    assert abs(lane.store.live_slots() / (model.depth * lane.store.heads) - KEPT) <= 2


@pytest.mark.parametrize("name", BY_TOKENS)
def test_requested_budgets_are_within_the_knob_limits_for_any_prompt(name):
    for tokens in (8, 32, 512):
        for prompt in (20, 300, 8000):
            make(name, **find(name).knobs_for_budget(tokens, prompt)).check()


def test_policies_without_a_token_budget_use_the_choices_of_their_first_knob():
    assert [point.name for point in default_points(find("kivi"))] == ["kivi, bits 2", "kivi, bits 4", "kivi, bits 8"]
    assert default_points(find("mustafar")) == [Point("mustafar", "mustafar")]


# --- expected shares ---

@pytest.mark.parametrize("point", points_at_budget(KEPT, PROMPT)[1:], ids=lambda point: point.name)
def test_a_policy_holds_its_expected_share(point, model):
    """After the prompt and at the end, within a twentieth of the full cache: in bytes if it quantises, in tokens if
    it does not.
    """
    for generated in (1, WRITTEN):
        lane, full = driven(point, model, generated), full_cache(model, PROMPT, generated)
        policy = lane.lane.target.cache_manager.policy
        quantises = isinstance(policy, Quantises)
        held = lane.store.bytes() / full_bytes(full.length) if quantises else held_share(lane, model)
        assert make(point.policy, **point.knobs).expected_share(full) == pytest.approx(held, abs=0.05)


@pytest.mark.parametrize("name", PACKING)
def test_bits_of_a_quantised_value_equal_its_storage(name, model):
    lane = driven(Point(name, name, ALL_LAYERS.get(name, {})), model, 1)
    policy, full = lane.lane.target.cache_manager.policy, full_cache(model, PROMPT, 1)
    for part in ("keys", "values"):
        packed = getattr(lane.store, part)[0].quantised_rows
        if packed is None:
            assert policy.quantise_count(part, PROMPT) == 0
            continue
        numbers = packed.count * full.heads * full.head
        assert policy.quantised_bits(part, full) == pytest.approx(8 * packed.bytes / numbers, rel=0.01)


def test_the_expected_share_of_a_budget_is_relative_to_the_whole_text():
    assert make("h2o", heavy=30, recent=20).expected_share(Full(90, 10, 4, 2, 16, 32)) == 0.5
    assert make("snapkv", capacity=40).expected_share(Full(90, 10, 4, 2, 16, 32)) == 0.5
    assert make("kivi", bits="8", residual=8, group=8).expected_share(Full(8, 0, 4, 2, 16, 32)) == pytest.approx(
        (12 / 32 + 1) / 2
    )
    assert make("cachegen").expected_share(Full(90, 10, 4, 2, 16, 32)) == 1.0


# --- memory ---

@dataclass(frozen=True)
class Packed:
    rows: torch.Tensor
    others: list


def test_storages_are_found_in_any_nesting_and_counted_once():
    whole = torch.zeros(10, 10)
    found = list(tensors(Packed(whole[:1], [(whole[1:2],), torch.ones(3)])))
    assert [tuple(each.shape) for each in found] == [(1, 10), (1, 10), (3,)]


def test_a_view_counts_with_its_whole_storage(model):
    lane = driven(Point("kivi", "kivi"), model, 1)
    before = allocated(lane.store)
    pool = lane.store.keys[0]
    pool.rows = torch.zeros(2, 1000, 16)[:, :pool.rows.shape[1]]
    assert allocated(lane.store) > before + 100_000


def test_memory_is_measured_after_the_prompt_and_at_the_end(model):
    plain, cut = (
        measure(MemoryRequest(point, "tiny", PROMPT, WRITTEN, 1))
        for point in (Point(FULL), Point("sink_window", "sink_window", {"window": 28}))
    )
    assert plain.early.full == plain.early.promised == full_bytes(PROMPT + 1) and plain.late.full == full_bytes(
        PROMPT + WRITTEN
    )
    assert cut.early.promised == pytest.approx(full_bytes(32)) and full_bytes(32) <= cut.early.allocated <= full_bytes(
        32 + 64
    )


def full_bytes(tokens: int) -> int:
    return 2 * tokens * 2 * 2 * 16 * 4  # keys and values, layers, heads, numbers of a head, bytes


def test_a_refused_policy_is_reported():
    bad = measure(MemoryRequest(Point("snapkv", "snapkv", {"capacity": 8}), "tiny", 20, 2, 1))
    assert "capacity" in bad.failure and bad.early is None and memory_rows([bad])[-1][:2] == ["snapkv", "failed"]


FULL_RUN = MemoryUse(1000, 1000, 1400, 1100)


@pytest.mark.parametrize("own, holds", [
    (MemoryUse(1000, 200, 210, 320), True),
    (MemoryUse(1000, 200, 330, 320), False),  # storages: 670 of 800 that were promised
    (MemoryUse(1000, 200, 210, 430), False),  # resident: likewise
    (MemoryUse(1000, 1000, 1100, 1200), True),  # nothing expected
    (MemoryUse(1000, 1000, 1000, 1300), False),  # and yet more used
])
def test_memory_counts_as_freed_if_storages_and_resident_memory_are_close_to_the_expected_share(own, holds):
    assert NEAR == 0.15 and Freed.of(own, FULL_RUN).holds is holds


def test_slack_of_the_full_cache_does_not_count_as_freed():
    gap = Freed.of(MemoryUse(1000, 200, 200, 300), FULL_RUN)
    assert gap.storages == gap.promised == gap.resident == pytest.approx(0.8) and gap.off == pytest.approx((0, 0))


def test_without_the_full_cache_there_is_no_comparison():
    assert freed([MemoryResult(FULL, failure="out of memory"), MemoryResult("h2o", FULL_RUN, FULL_RUN)]) == {}


# --- steps ---

def test_every_lane_takes_every_step_and_warm_up_is_dropped(model):
    paces = TimedLanes(model, 40, 3).run([Point(FULL), Point("tova", "tova", {"size": 16})])
    assert [pace.name for pace in paces] == [FULL, "tova", AGAIN]
    assert all(len(pace.seconds) == 3 and min(pace.seconds) > 0 for pace in paces)


def test_a_step_reads_one_token_and_lets_the_policy_act(model):
    lane = PolicyLane(Point("tova", "tova", {"size": 16}), model, some_tokens(model, 40), 5)
    lane.prefill()
    for step in range(1, 6):
        lane.step()
        assert (
            lane.store.length == 40 + step and lane.lane.generated == 1 + step and lane.store.live_slots() == 16 * 2 * 2
        )


def test_a_step_is_compared_with_the_plain_step_of_its_round():
    slow, plain = StepTimes("slow", [2.0, 4.0, 30.0]), StepTimes(FULL, [1.0, 2.0, 3.0])
    ratio = StepRatio.of(slow, plain)
    assert ratio.rounds == (2.0, 2.0, 10.0) and ratio.whole == 6.0 and not ratio.holds
    assert StepRatio.of(StepTimes("quick", [SLOWER, 2 * SLOWER, 60.0]), plain).holds  # the median decides


def test_lanes_that_fail_are_left_out_of_the_comparison():
    assert [
        ratio.name
        for ratio in ratios([StepTimes(FULL, [1.0]), StepTimes("broken", failure="why"), StepTimes("fine", [1.0])])
    ] == ["fine"]


# --- score ---

def test_shares_follow_the_length_of_each_question():
    lengths = {"short": 100, "long": 400}
    entrant = BudgetedEntrant("prefixkv, 40", Point("").config, "prefixkv", 40, lambda question: lengths[question])
    assert [entrant.config_for(question).extras[0][1]["keep"] for question in lengths] == [0.4, 0.1]


def test_every_policy_is_measured_at_every_budget():
    trial = RecallTrial(Models(random_model("tiny", 512)), [], (32, 64), 1)
    names = [entrant.name for entrant in trial.entrants()]
    assert names[0] == FULL and len(names) == len(set(names))
    assert {name.split(",")[0] for name in names[1:]} == {cls.name for cls in policies()}
    assert {"h2o, 32", "h2o, 64", "kivi, bits 4"} <= set(names)


def test_needles_are_numbers_and_both_tasks_have_equally_many_questions():
    asked = questions(5, seed=3)
    assert [question.task for question in asked] == ["needle"] * 5 + ["chat"] * 5
    assert all(question.answer.isdigit() for question in asked[:5])


def test_the_axis_of_cache_sizes_is_logarithmic():
    found = [
        Measured("needle", FULL, FULL, 1.0, Score(0.9, 0.1, 5)),
        *(
            Measured("needle", f"h2o, {tokens}", "h2o", share, Score(share, None, 5))
            for tokens, share in ((64, 0.5), (16, 0.125), (32, 0.25))
        ),
    ]
    drawn = chart("needle", found)
    assert (
        drawn.places == ["12.5 %", "25 %", "50 %", "100 %"]
        and drawn.at == {"h2o": [0, 1, 2]}
        and drawn.levels == {FULL: 0.9}
    )
    assert drawn.series == {"h2o": [(0.125, 0.0), (0.25, 0.0), (0.5, 0.0)]}


def test_values_between_ticks_are_drawn_between_them():
    def points(at):
        svg = ElementTree.fromstring(
            Chart("t", "x", "y", ["a", "b", "c"], {"s": [(1.0, 0.0), (1.0, 0.0)]}, at=at).svg()
        )
        return [float(circle.get("cx")) for circle in svg.iter(f"{SVG}circle")]

    (a, b), (middle, last) = points({}), points({"s": [0.5, 2.0]})
    assert middle == pytest.approx((a + b) / 2, abs=0.1) and last == pytest.approx(b + (b - a), abs=0.1)


def test_charts_are_placed_below_each_other_without_overlap():
    charts = [Chart(f"chart {k}", "x", "y", ["a"], {"s": [(1.0, 0.0)]}) for k in range(3)]
    whole = ElementTree.fromstring(below(charts))
    inner = whole.findall(f"{SVG}svg")
    assert [int(svg.get("y")) for svg in inner] == [sum(chart.height for chart in charts[:k]) for k in range(3)]
    assert int(whole.get("viewBox").split()[3]) == sum(chart.height for chart in charts)


# --- the command ---

def run(*words: str) -> int:
    level = logging.getLogger("playground").level
    code = main([*words])
    logging.getLogger("playground").setLevel(level)
    return code


def test_the_command_writes_numbers_a_page_and_a_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("playground.bench.caches.recall_score.ANSWER", 8)
    out, page = tmp_path / "caches.json", tmp_path / "caches.md"
    assert (
        run(
            "bench",
            "caches",
            "--only",
            "sink_window",
            "--shape",
            "tiny",
            "--questions",
            "2",
            "--budgets",
            "32",
            "64",
            "--tokens",
            "200",
            "--written",
            "2",
            "--kept",
            "32",
            "--behind",
            "40",
            "--rounds",
            "2",
            "--threads",
            "1",
            "--out",
            str(out),
            "--page",
            str(page),
        )
        == 0
    )
    report, text = json.loads(out.read_text()), page.read_text()
    assert report["format"] == "decoding-playground-caches" and report["failures"] == []
    assert [each["name"] for each in report["memory"]] == [FULL, "sink_window"]
    assert all(len(each["seconds"]) == 2 for each in report["step"]) and len(report["score"]) == 2 * (1 + 2)
    assert "caches/score.svg" in text and (tmp_path / "caches" / "score.svg").exists()
    assert (
        all(title in text for title in ("## Score against cache size", "## Memory", "## A step", "bench caches"))
        and "Memory" in capsys.readouterr().out
    )


def test_parts_can_be_measured_alone(tmp_path):
    out, page = tmp_path / "c.json", tmp_path / "c.md"
    assert (
        run(
            "bench",
            "caches",
            "--parts",
            "step",
            "--only",
            "tova",
            "--shape",
            "tiny",
            "--behind",
            "40",
            "--rounds",
            "1",
            "--kept",
            "16",
            "--out",
            str(out),
            "--page",
            str(page),
        )
        == 0
    )
    report = json.loads(out.read_text())
    assert report["score"] == report["memory"] == []
    assert [pace["name"] for pace in report["step"]] == [FULL, "tova", AGAIN]
    assert "## Memory" not in page.read_text() and not (tmp_path / "c").exists()


# --- rows that are measured again ---

RENEWED = ("bench", "caches", "--parts", "score", "--questions", "2", "--budgets", "32", "64", "--threads", "1")


def renewed(page: Path, monkeypatch, score: float) -> int:
    """The rows of sink_window measured again on two questions, on which it now has this score."""
    def measured(self, answers):
        list(answers)
        return [Measured(task, name, name.split(",")[0], 0.25, Score(score, 0.0, 2))
                for task in ("needle", "chat") for name in (FULL, "sink_window, 32", "sink_window, 64")]

    monkeypatch.setattr(RecallTrial, "measured", measured)
    monkeypatch.setattr(RecallTrial, "answers", lambda self: iter(()))
    monkeypatch.setattr("playground.cli.bench.caches.answered_by_all", lambda answers, entrants: [...])
    return run(*RENEWED, "--only", "sink_window", "--page", str(page))


def test_only_the_rows_of_the_named_policies_are_renewed(tmp_path, monkeypatch):
    page = tmp_path / "caches.md"
    facts = {"settings": {"budgets": "32 64", "questions": 2, "seed": 1}, "machine": {"processor": "another"}}
    page.write_text(Findings(facts, [*some_scores(), *(
        Measured(task, "sink_window, 32", "sink_window", 0.2, Score(0.125, 0.1, 5)) for task in ("needle", "chat")
    )]).page("caches/score.svg"), encoding="utf-8")
    before = page.read_text(encoding="utf-8")
    assert renewed(page, monkeypatch, 0.75) == 0
    after = page.read_text(encoding="utf-8")
    of_others = [{each for each in measured_in(text, 2) if each.series != "sink_window"} for text in (before, after)]
    assert of_others[0] == of_others[1] and len(of_others[0]) == 2 * 8
    assert "| sink_window, 32 | 25.0% | 0.750 ± 0.000 | 25.0% | 0.750 ± 0.000 |" in after and "0.125" not in after
    assert "| scores of sink_window | measured later" in after and "1. 0.900 (snapkv, 64)" in after
    assert renewed(page, monkeypatch, 0.75) == 0 and page.read_text(encoding="utf-8") == after
    assert renewed(page, monkeypatch, 0.90004) == 0
    text = page.read_text(encoding="utf-8")
    assert "1. 0.900 (sink_window, 32)" in text and "1. 0.900 (snapkv, 64)" in text
    assert "sink_window" in (tmp_path / "caches" / "score.svg").read_text(encoding="utf-8")


def test_a_page_of_other_questions_or_of_no_scores_is_not_mixed_with_new_rows(tmp_path, monkeypatch, capsys):
    page = tmp_path / "caches.md"
    page.write_text("# Cache policies\n", encoding="utf-8")
    assert renewed(page, monkeypatch, 0.5) == 2 and "no table of scores" in capsys.readouterr().err
    facts = {"settings": {"budgets": "32 64", "questions": 3, "seed": 1}}
    page.write_text(Findings(facts, some_scores()).page("p.svg"), encoding="utf-8")
    assert renewed(page, monkeypatch, 0.5) == 2 and "questions" in capsys.readouterr().err
    assert run("bench", "caches", "--only", "greedy") == 2 and "no cache policy" in capsys.readouterr().err


# --- the ranking at equal memory ---

def some_scores() -> list[Measured]:
    given = [("snapkv, 64", 0.24, 0.9), ("snapkv, 128", 0.48, 0.8), ("h2o, 64", 0.255, 0.5), ("h2o, 128", 0.6, 1.0),
             ("tova, 64", 0.24, 0.5), ("kivi, bits 2", 0.3, 1.0), ("cachegen", 1.0, 1.0)]
    return [
        Measured(task, name, name.split(",")[0], share, Score(score, 0.1, 5))
        for task in ("needle", "chat")
        for name, share, score in [(FULL, 1.0, 1.0), *given]
    ]


def test_every_policy_counts_with_its_best_setting_that_fits_and_equal_scores_share_a_place():
    quarter, half = (places(some_scores(), "needle", limit) for limit in (0.25, 0.5))
    assert {name: (placed.place, placed.entrant) for name, placed in quarter.items()} == {
        "snapkv": (1, "snapkv, 64"), "h2o": (2, "h2o, 64"), "tova": (2, "tova, 64")
    }
    assert {name: placed.place for name, placed in half.items()} == {"kivi": 1, "snapkv": 2, "h2o": 3, "tova": 3}


def test_the_table_lists_all_policies_and_those_that_fit_at_every_limit_first():
    header, *rows = ranking_rows(some_scores())
    assert [row[0] for row in rows] == ["snapkv", "h2o", "tova", "kivi", "cachegen"]
    assert rows[0][1:4] == ["1.5", "1. 0.900 (snapkv, 64)", "2. 0.900 (snapkv, 64)"] and rows[-1][1:] == ["-"] * 5
    assert len(header) == 6


def test_published_orderings_are_counted_against_the_policies_that_fit():
    rows = claim_rows(some_scores())
    assert len(rows) == 1 + len(CLAIMS) and rows[1][1:3] == ["snapkv", "above 2 of 2"] and rows[2][2] == "-"
    known = {cls.name for cls in policies()}
    assert all({claim.above, *claim.below} <= known for claim in CLAIMS)
