"""Speculative decoding is compared with plain decoding and with the library: lanes, counts, and aims."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs import network, pair

from playground.bench.speculation import speed_summary
from playground.bench.speculation.findings import (
    FULL,
    MAX_OVERHEAD,
    compare_with_library,
    lane_results,
    round_overheads,
)
from playground.bench.speculation.library_baselines import Library, Watched
from playground.bench.speculation.observe import LibraryExaminer, ObservedAnswer, ObservedRound, observe, rounds_of
from playground.bench.speculation.speculation_report import document, page, sections
from playground.bench.speculation.speculative_lanes import AIMS, PAIRS, PLAIN, Pair, entrants, pairs
from playground.bench.speculation.speed_summary import summary
from playground.bench.speed.baselines import TwinModels
from playground.cli import main
from playground.contract import discover
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.errors import Refusal
from playground.events import Draft, Forward, Stamped
from playground.questions.questions import Question

pytestmark = pytest.mark.bench

ROOT = Path(__file__).parents[1]
BIRD = Question("edit", "The green bird", None, chat=False)
ASSISTED, LOOKED_UP = PAIRS[0], PAIRS[2]


def made(entrant: str, round: int = 1, task: str = "edit", **facts) -> ObservedAnswer:
    return ObservedAnswer(
        entrant,
        0,
        replace(BIRD, task=task),
        round,
        seed=0,
        **{"token_ids": [5, 6, 7], "seconds": 1.0, "forwards": {"target": 1}, **facts},
    )


def event(at: float, what) -> Stamped:
    return Stamped(0, 0, at, what)


# --- which lanes are measured ---

def test_every_drafter_and_every_lossless_preset_is_measured():
    names = {lane.name.partition(":")[0] for lane in entrants(draft=True)}
    drafters = {cls.name for cls in discover().values() if cls.kind == "drafter" and set(cls.needs) <= {"draft"}}
    assert names >= drafters - {"layer_skip_draft"} | {PLAIN, "layer_skip", "pearl"}
    assert not names & {"reflective", "rapid", "ead"}


def test_every_lane_can_be_assembled_and_is_greedy():
    for lane in entrants(draft=True):
        assembly = assemble(lane.config)
        assert not assembly.samplers and (lane.name == PLAIN or assembly.decoder.verifier.name == "greedy_match")


def test_without_a_draft_model_only_the_other_drafters_run():
    names = [lane.name for lane in entrants(draft=False)]
    assert "jacobi" in names and "dyspec" not in names and not any(name.startswith("draft_model") for name in names)


def test_library_baselines_are_measured_if_their_counterpart_is():
    assert [found.theirs for found in pairs(entrants(True, ["prompt_lookup"]))] == [
        "generate, prompt lookup, 10",
        "generate, prompt lookup, 20",
    ]
    assert pairs(entrants(True, ["jacobi"])) == []


def test_a_lossy_strategy_is_refused_in_one_sentence():
    for name in ("nobody", "reflective", "top_p"):
        with pytest.raises(Refusal, match=f"{name} is no lossless speculative strategy here; choose some of aded, "):
            entrants(True, [name])


# --- what is counted ---

def test_the_overhead_of_a_round_is_the_time_between_target_forwards_outside_any_forward():
    events = [event(1.0, Forward(phase="prefill", seconds=0.9)), event(1.0, Draft(tokens=[4, 5], parents=[-1, 0])),
              event(1.5, Forward(seconds=0.3)),  # 0.5 s, of which 0.3 in the forward
              event(1.7, Forward(stream="draft", seconds=0.1)), event(1.8, Forward(stream="draft", seconds=0.1)),
              # 0.9 s, of which 0.7 in forwards
              event(1.8, Draft(tokens=[4], parents=[-1])), event(2.4, Forward(seconds=0.5))]
    assert [found.draft_tokens for found in rounds_of(events)] == [2, 1]
    assert [found.overhead for found in rounds_of(events)] == pytest.approx([0.2, 0.2])
    assert [found.other_forwards for found in rounds_of(events)] == [0, 2]


def test_draft_tokens_of_the_library_are_tested_up_to_the_first_rejected_one():
    watched = Watched()
    watched.put(torch.tensor([[1, 2, 3]]))
    for fed, came in (([1, 2, 3, 7, 8, 9], [7, 8, 4]), ([4, 5, 6], [5, 6, 0]), ([0], [2]), ([2, 3], [9])):
        watched.before_target_forward(torch.nn.Identity(), (), {"input_ids": torch.tensor([fed])})
        watched.put(torch.tensor(came))
    assert watched.drafts == [[7, 8, 9], [5, 6], [], [3]] and watched.ids == [7, 8, 4, 5, 6, 0, 2, 9]
    assert watched.trials() == [(2, 3), (2, 2), (0, 1)]


def test_a_draft_token_that_ends_the_text_is_accepted_and_later_ones_are_untested():
    watched = Watched()
    watched.put(torch.tensor([[1]]))
    watched.before_target_forward(torch.nn.Identity(), (), {"input_ids": torch.tensor([[1, 6, 2, 8]])})
    watched.put(torch.tensor([6, 2]))
    assert watched.trials() == [(1, 1), (1, 1)]


def loaded(model) -> TwinModels:
    """With the same weights in an unmodified network of the library."""
    untouched = network("llama")
    untouched.load_state_dict(model.network.state_dict())
    return TwinModels(model, untouched)


@pytest.fixture(scope="module")
def answers() -> list[ObservedAnswer]:
    """Three lanes and the library on small models that draft badly, twice."""
    models, lanes = pair(), [*entrants(True, ["draft_model", "prompt_lookup"])]
    library = {
        found.theirs: Library.of(found, loaded(models.target), loaded(models.draft), 12)
        for found in (ASSISTED, LOOKED_UP)
    }
    examiner = LibraryExaminer(models, Limits(max_new_tokens=12), lambda question, text: None, library)
    everyone = examiner.entrants([lane for lane in lanes if lane.name in (PLAIN, ASSISTED.ours, LOOKED_UP.ours)])
    return list(
        observe(
            examiner,
            everyone,
            [replace(BIRD, prompt="A bird, a bird, a bird, a bird, a "), replace(BIRD, task="chat")],
            2,
        )
    )


def test_the_library_writes_our_text_and_its_draft_tokens_are_counted_as_ours(answers):
    assert len(answers) == 5 * 2 * 2 and not any(answer.failure for answer in answers)
    ours = {(answer.number, answer.round): answer.token_ids for answer in answers if answer.entrant == PLAIN}
    assert all(answer.token_ids == ours[answer.number, answer.round] for answer in answers)
    for answer in answers:
        if answer.entrant in (ASSISTED.theirs, LOOKED_UP.theirs):
            passes = answer.forwards["target"] + 1  # the prefill, which verifies draft tokens too
            # each forward gives one token of the target's, except perhaps the last
            assert passes + answer.accepted - len(answer.token_ids) in (0, 1)
            assert answer.accepted <= answer.tested and answer.seconds > 0 and not answer.rounds
            assert answer.tested > 0 or answer.entrant == LOOKED_UP.theirs
            assert (answer.forwards.get("draft", 0) > 0) == (answer.entrant == ASSISTED.theirs)


def test_a_lane_has_one_round_per_target_forward(answers):
    lanes = [answer for answer in answers if answer.entrant in (PLAIN, ASSISTED.ours)]
    assert lanes and all(len(answer.rounds) == answer.forwards["target"] for answer in lanes)
    assert all(found.draft_tokens == 0 for answer in lanes for found in answer.rounds if answer.entrant == PLAIN)
    assert all(
        0 < found.draft_tokens <= ASSISTED.depth
        for answer in lanes
        for found in answer.rounds[:1]
        if answer.entrant == ASSISTED.ours
    )
    assert all(sum(found.overhead for found in answer.rounds) < answer.clock for answer in lanes)


def test_what_was_measured_can_be_read_back_and_names_its_command(answers):
    found = document({"settings": {"model": "toy"}, "machine": {"cores": 2}}, answers, [ASSISTED, LOOKED_UP])
    assert json.loads(json.dumps(found)) == found and len(found["table"]) == 5 * 2 and len(found["library"]) == 2 * 2
    assert {work["entrant"] for work in found["work"]} == {PLAIN, ASSISTED.ours, LOOKED_UP.ours}
    text = page(found)
    assert (
        "python -m playground bench speculation" in text
        and "| cores | 2 |" in text
        and f"| {ASSISTED.ours} | {ASSISTED.theirs} |" in text
    )
    for row in found["table"]:  # each lane has a line, and each task a column of it
        heading, line = (next(line.split(" | ") for line in text.splitlines() if line.startswith(start))
                         for start in ("| lane | ", f"| {row['entrant']} | "))
        shown = line[heading.index(row["task"]) if row["task"] in heading else -1].removesuffix(" |")
        assert shown == ("failed" if row["failed"] else f"{row['times_as_fast']['median']:.2f}") or "≠" in shown


def test_the_page_of_the_repository_says_what_its_data_says():
    data = json.loads((ROOT / "docs" / "guessing.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "guessing.md").read_text(encoding="utf-8") == page(data)


# --- when an aim is reached ---

@pytest.mark.parametrize("task", list(AIMS))
def test_an_aim_is_reached_by_the_median_of_the_rounds_with_the_same_text_and_no_failure(task):
    def reaches(times: list[float], **facts) -> bool:
        plain = [made(PLAIN, round, task) for round in (1, 2, 3)]
        lane = [made("fast", round, task, **{"seconds": 1 / speed, **facts}) for round, speed in enumerate(times, 1)]
        return lane_results(plain + lane)[1].reaches

    aim = AIMS[task]
    assert reaches([aim / 2, aim * 1.01, aim * 2]) and not reaches([aim * 2, aim * 0.99, aim / 2])
    assert not reaches([aim * 2] * 3, token_ids=[5, 6, 8]) and not reaches([aim * 2] * 3, failure="it stopped")


def test_tasks_without_an_aim_have_none_to_reach():
    assert not lane_results([made(PLAIN, task="lists"), made("fast", task="lists", seconds=0.01)])[1].reaches


def compared(ours: dict, theirs: dict, task: str = "edit"):
    (match,) = compare_with_library(
        [made(PLAIN, task=task), made(ASSISTED.ours, task=task, **ours), made(ASSISTED.theirs, task=task, **theirs)],
        [ASSISTED],
    )
    return match


def test_comparisons_flag_slower_times_and_lower_acceptance():
    assert (
        compared({"seconds": 2.0}, {"seconds": 1.0}).slower and not compared({"seconds": 1.0}, {"seconds": 2.0}).slower
    )
    assert compared({"seconds": 2.0}, {"seconds": 1.0}).times.median == 0.5
    assert (
        compared({"trials": [(3, 5)]}, {"trials": [(4, 5)]}).accepts_less
        and not compared({"trials": [(8, 10)]}, {"trials": [(4, 5)]}).accepts_less
    )
    assert compared({}, {"trials": [(4, 5)]}).accepts_less and not compared({"trials": [(4, 5)]}, {}).accepts_less


def test_only_full_rounds_decide_whether_the_overhead_is_too_long():
    def work(*rounds: ObservedRound):
        found, = round_overheads([made("lane", rounds=list(rounds))])
        return found

    full, small = ObservedRound(64, MAX_OVERHEAD * 2, 30), ObservedRound(FULL[0] - 1, MAX_OVERHEAD * 9, 10)
    assert (
        work(full, small).too_long
        and work(full, small).full == 1
        and work(full, small).full_seconds == MAX_OVERHEAD * 2
    )
    assert work(full, small).passes == 20  # the median of all
    assert (
        not work(small).too_long
        and work(small).full_seconds is None
        and not work(full._replace(overhead=MAX_OVERHEAD / 2), small).too_long
    )


def test_tables_show_lanes_that_reach_an_aim_and_where_ours_is_worse():
    found = [
        made(PLAIN),
        made("quick", seconds=0.2),
        made(ASSISTED.ours, seconds=0.5),
        made(ASSISTED.theirs, seconds=0.4),
    ]
    tables = {title: rows for title, _, rows in sections(found, [ASSISTED])}
    assert tables["Aims"][1] == ["edit", "4", "quick", "5.00", "quick"]
    assert [row[0] for row in tables["Edit"] if row[2].startswith("reaches")] == ["quick"]
    assert tables["Compared with the library"][1][-1] == "slower"


def test_names_of_a_pair_state_the_common_depth():
    assert Pair("draft_model:depth=5", "assisted", 5).theirs == "generate, assisted, 5"
    assert all(f"depth={found.depth}" in found.ours for found in PAIRS)


# --- the command ---

def test_the_command_measures_prints_and_writes(tmp_path, capsys):
    json_file, page_file = tmp_path / "guessing.json", tmp_path / "guessing.md"
    assert (
        main(
            [
                "bench",
                "speculation",
                "--only",
                "prompt_lookup",
                "--tasks",
                "facts",
                "--questions",
                "1",
                "--repeats",
                "1",
                "--max-new-tokens",
                "4",
                "--out",
                str(json_file),
                "--page",
                str(page_file),
            ]
        )
        == 0
    )
    recorded, found = capsys.readouterr().out, json.loads(json_file.read_text())
    assert {row["entrant"] for row in found["table"]} == {
        PLAIN,
        PAIRS[2].ours,
        PAIRS[3].ours,
        PAIRS[2].theirs,
        PAIRS[3].theirs,
    }
    assert all(row["same_text"] == row["compared"] == 1 for row in found["table"]) and found["failures"] == []
    assert found["settings"]["questions"] == 1 and found["machine"]["torch"]
    assert "Compared with the library" in recorded and "## Speed-up" in page_file.read_text()


def test_an_unknown_task_or_lane_is_refused_before_anything_is_loaded(capsys):
    assert (
        main(["bench", "guessing", "--tasks", "knitting"])
        == main(["bench", "speculation", "--only", "knitting", "--model", "nowhere"])
        == 2
    )
    assert capsys.readouterr().err.count("knitting") == 2


# --- the summary for the library page ---

def row(entrant: str, task: str, speed_up: float, **facts) -> dict:
    return {
        "entrant": entrant,
        "task": task,
        "times_as_fast": {"median": speed_up},
        "tokens_per_target_forward": 2 * speed_up,
        "failed": 0,
        "same_text": 9,
        "compared": 9,
        **facts,
    }


def summed_up(*rows: dict) -> dict:
    settings = {"model": "m", "draft": "d", "questions": 1, "repeats": 2}
    return summary({
        "table": [row("greedy", "edit", 1.0), *rows],
        "library": [{"theirs": LOOKED_UP.theirs}],
        "settings": settings,
        "machine": {"processor": "p", "threads": 1},
    })


def test_a_drafter_is_summed_up_by_its_fastest_setting_over_the_tasks():
    slow = [row("draft_model", task, times) for task, times in (("edit", 0.5), ("facts", 0.6), ("lists", 3.0))]
    fast = [row("draft_model:depth=5", task, times) for task, times in (("edit", 1.5), ("facts", 0.7), ("lists", 1.2))]
    found = summed_up(*fast, *slow, row(LOOKED_UP.theirs, "edit", 9.0))
    assert found["strategies"] == {
        "draft_model": {
            "lane": "draft_model:depth=5",
            "tasks": 3,
            "speed_up": 1.2,
            "slowest": ["facts", 0.7],
            "fastest": ["edit", 1.5],
            "tokens_per_target_forward": 2.4,
        }
    }
    assert found["measured"] == {
        "model": "m", "draft": "d", "questions": 1, "repeats": 2, "processor": "p", "threads": 1
    }


@pytest.mark.parametrize("wrong", [{"same_text": 8}, {"failed": 1}, {"times_as_fast": None}])
def test_a_lane_that_failed_or_wrote_another_text_has_no_speed(wrong):
    assert summed_up(row("jacobi", "edit", 1.0), row("jacobi", "facts", 2.0, **wrong))["strategies"] == {}


def test_what_the_library_page_shows_is_what_was_measured():
    documented = json.loads((ROOT / "docs" / "guessing.json").read_text())
    assert speed_summary.bundled() == summary(documented)
    line = speed_summary.bundled()["strategies"]["draft_model"]
    shown = speed_summary.sentence("draft_model")
    assert f"{line['speed_up']:.2f} times the plain lane's" in shown and line["fastest"][0] in shown
    assert documented["machine"]["processor"] in shown and speed_summary.sentence("greedy") == ""
