"""Results of the speculation benchmark as plain data, as terminal tables and as a Markdown page."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from playground.bench.report_text import Rows, facts_table, failure_lines, markdown_page, number, section, spread_text
from playground.bench.speculation.findings import (
    FULL,
    MAX_OVERHEAD,
    LaneResult,
    LibraryComparison,
    compare_with_library,
    lane_results,
    round_overheads,
)
from playground.bench.speculation.observe import ObservedAnswer
from playground.bench.speculation.speculative_lanes import AIMS, PLAIN, Pair
from playground.bench.spread import Spread
from playground.bench.survey.results import by_position

FORMAT, VERSION = "decoding-playground-guessing", 1
NOTES = """Every lane answered every question on its own, in one process, interleaved round by round; the order rotated
from question to question, and a warm-up was dropped. All decode greedily, so each text should be the plain lane's, and
*same text* counts how many were. *Speed-up*: the plain lane's wall-clock seconds divided by the lane's own,
prefill and recording included, within each round; median (lowest to highest) of the rounds. *Tokens per target
forward*: tokens after the first divided by forwards of the target, prefill excluded, so that plain decoding gives 1.
*Accepted*: draft tokens accepted / tested, in total and by position in the draft. Nothing is carried over from one
question to the next. A strategy named without knobs has its defaults."""
DATA = """One line for each lane stands here; [guessing.json](guessing.json) has for each lane and task also the
spread of the rounds, what was accepted by position, other forwards and the number of equal texts."""
AIMED = "The fastest lane that writes the plain lane's texts, for tasks with a required speed-up."
SPEED = "Medians. ≠: a text differs from the plain lane's."
BESIDE = """The library's `generate` on the same weights in a network without our hooks, with as many draft tokens per
round from the same draft model or with the same maximum ngram. It gets token ids, while ours include encoding the
prompt. It already verifies draft tokens in the prefill, which is not counted as a forward. *Ours / theirs*: the
speed-up of ours over theirs."""
WORK = f"""Over all tasks: medians of a round's draft tokens, and of the milliseconds of the lane's clock between two
target forwards that are outside any forward: drafting, trees, verification, commit and recording. *Other forwards* are
those of a draft model or of early layers. The work around each of them counts as well, so that deep drafts, in which
every position needs its own forward, cost the most. *Full rounds* have {FULL[0]} to {FULL[1]} draft tokens and may
take at most {1000 * MAX_OVERHEAD:g} ms."""


def document(facts: dict[str, Any], answers: Sequence[ObservedAnswer], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Plain data for JSON. facts: settings and machine."""
    return {
        "format": FORMAT,
        "version": VERSION,
        **facts,
        "aims": AIMS,
        "table": [found.to_json() for found in lane_results(answers)],
        "library": [found.to_json() for found in compare_with_library(answers, pairs)],
        "work": [found.to_json() for found in round_overheads(answers)],
        "failures": failure_lines((answer.entrant, answer.failure) for answer in answers),
    }


def page(found: dict[str, Any]) -> str:
    """What a document says, in Markdown, with one line for each lane."""
    lanes, compared, overheads = found["table"], found["library"], found["work"]
    return markdown_page(
        "# Speculative decoding",
        "Made by `python -m playground bench speculation --out --page`.",
        NOTES,
        DATA,
        facts_table({part: found[part] for part in ("settings", "machine")}),
        section("Aims", _aims(lanes), AIMED) if any(row["aim"] for row in lanes) else "",
        section("Speed-up", _by_task(lanes, ["entrant"], _speed_cell), SPEED),
        section("Tokens per target forward", _by_task(lanes, ["entrant"], _tokens_cell)),
        section("Compared with the library", _by_task(compared, ["ours", "theirs"], _median), BESIDE)
        if compared else "",
        section("Overhead of a round", _worked(overheads), WORK) if overheads else "",
    )


def _by_task(rows: list[dict[str, Any]], names: list[str], cell: Callable[[dict[str, Any]], str]) -> Rows:
    """A line for each lane, or pair of lanes, with a cell for each task; empty where it was not measured."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    cells = {(*(row[name] for name in names), row["task"]): cell(row) for row in rows}
    lanes = dict.fromkeys(key[:-1] for key in cells)
    head = ["lane"] if names == ["entrant"] else names
    lines = ([*lane, *(cells.get((*lane, task), "") for task in tasks)] for lane in lanes)
    return [[*head, *tasks], *lines]


def _median(row: dict[str, Any]) -> str:
    return number(row["times_as_fast"] and row["times_as_fast"]["median"], 2)


def _speed_cell(row: dict[str, Any]) -> str:
    return "failed" if row["failed"] else _median(row) + " ≠" * (row["same_text"] < row["compared"])


def _tokens_cell(row: dict[str, Any]) -> str:
    return number(row["tokens_per_target_forward"], 2)


def sections(answers: Sequence[ObservedAnswer], pairs: Sequence[Pair]) -> Iterator[tuple[str, str, Rows]]:
    """Title, note and table, with every number: aims, tasks, comparison with the library, overhead."""
    results = lane_results(answers)
    tasks = list(dict.fromkeys(result.row.task for result in results))
    if AIMS.keys() & set(tasks):
        yield "Aims", AIMED, _aims([result.to_json() for result in results])
    for task in tasks:
        rows = [_cells(result) for result in results if result.row.task == task]
        yield task.capitalize(), "", [list(_HEADER), *rows]
    if compared := compare_with_library(answers, pairs):
        yield "Compared with the library", BESIDE, _beside(compared)
    if overheads := round_overheads(answers):
        yield "Overhead of a round", WORK, _worked([overhead.to_json() for overhead in overheads])


_HEADER = (
    "lane",
    "speed-up",
    "aim",
    "tokens per target forward",
    "accepted",
    "by position",
    "other forwards per token",
    "same text",
    "failed",
)


def _cells(result: LaneResult) -> list[str]:
    row = result.row
    return [
        row.entrant,
        spread_text(result.times, 2),
        f"reaches {AIMS[row.task]:g}" if result.reaches else "",
        number(result.tokens_per_target_forward, 2),
        number(row.acceptance, 2),
        by_position(row),
        number(row.other_forwards, 2),
        f"{row.same_text} of {row.compared}",
        str(row.failed or ""),
    ]


def _aims(rows: list[dict[str, Any]]) -> Rows:
    header = ["task", "aim", "fastest", "speed-up", "lanes that reach it"]
    lanes = [row for row in rows if row["entrant"] != PLAIN and row["same_text"] == row["compared"] > 0
             and row["times_as_fast"]]
    aims = {row["task"]: row["aim"] for row in rows if row["aim"]}
    return [header, *(_aim(task, aim, [lane for lane in lanes if lane["task"] == task]) for task, aim in aims.items())]


def _aim(task: str, aim: float, lanes: list[dict[str, Any]]) -> list[str]:
    fastest = max(lanes, key=lambda lane: lane["times_as_fast"]["median"], default=None)
    name, times = (fastest["entrant"], Spread(**fastest["times_as_fast"])) if fastest else ("-", None)
    reaching = ", ".join(lane["entrant"] for lane in lanes if lane["reaches"])
    return [task, f"{aim:g}", name, spread_text(times, 2), reaching or "none"]


def _beside(compared: list[LibraryComparison]) -> Rows:
    header = ["ours", "theirs", "task", "ours / theirs", "accepted", "theirs", "tokens per target forward", "theirs",
              "same text", "worse in"]
    return [header, *map(_match_cells, compared)]


def _match_cells(match: LibraryComparison) -> list[str]:
    return [
        match.pair.ours,
        match.pair.theirs,
        match.task,
        spread_text(match.times, 2),
        *(number(share, 2) for share in match.accepted),
        *(number(tokens, 2) for tokens in match.per_forward),
        f"{match.same_text} of {match.compared}",
        ", ".join(["slower"] * match.slower + ["accepts less"] * match.accepts_less),
    ]


def _worked(overheads: list[dict[str, Any]]) -> Rows:
    header = ["lane", "rounds", "draft tokens", "other forwards", "ms per round", "full rounds", "ms per full round",
              "too long"]
    return [header, *map(_overhead_cells, overheads)]


def _overhead_cells(lane: dict[str, Any]) -> list[str]:
    return [
        lane["entrant"],
        str(lane["rounds"]),
        number(lane["guesses"], 0),
        number(lane["passes"], 0),
        number(1000 * lane["seconds"], 2),
        str(lane["full"] or "-"),
        number(None if lane["full_seconds"] is None else 1000 * lane["full_seconds"], 2),
        "too long" if lane["too_long"] else "",
    ]
