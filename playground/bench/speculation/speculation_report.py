"""Results of the speculation benchmark as plain data, as terminal tables and as a Markdown page."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from playground.bench.report_text import Rows, facts_table, failure_lines, markdown_page, number, section, spread_text
from playground.bench.speculation.findings import (
    FULL,
    MAX_OVERHEAD,
    LaneResult,
    LibraryComparison,
    RoundOverhead,
    compare_with_library,
    lane_results,
    round_overheads,
)
from playground.bench.speculation.observe import ObservedAnswer
from playground.bench.speculation.speculative_lanes import AIMS, PLAIN, Pair
from playground.bench.survey.results import by_position

FORMAT, VERSION = "decoding-playground-guessing", 1
NOTES = """Every lane answered every question on its own, in one process, interleaved round by round; the order rotated
from question to question, and a warm-up was dropped. All decode greedily, so each text should be the plain lane's, and
*same text* counts how many were. *Speed-up*: the plain lane's wall-clock seconds divided by the lane's own,
prefill and recording included, within each round; median (lowest to highest) of the rounds. *Tokens per target
forward*: tokens after the first divided by forwards of the target, prefill excluded, so that plain decoding gives 1.
*Accepted*: draft tokens accepted / tested, in total and by position in the draft. Nothing is carried over from one
question to the next. A strategy named without knobs has its defaults."""
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


def page(facts: dict[str, Any], answers: Sequence[ObservedAnswer], pairs: Sequence[Pair]) -> str:
    """The tables in Markdown, with settings and machine."""
    return markdown_page(
        "# Speculative decoding",
        "Made by `python -m playground bench speculation --out --page`.",
        NOTES,
        facts_table(facts),
        *(section(title, rows, note) for title, note, rows in sections(answers, pairs)),
    )


def sections(answers: Sequence[ObservedAnswer], pairs: Sequence[Pair]) -> Iterator[tuple[str, str, Rows]]:
    """Title, note and table: aims, tasks, comparison with the library, overhead."""
    results = lane_results(answers)
    tasks = list(dict.fromkeys(result.row.task for result in results))
    if aimed := [task for task in tasks if task in AIMS]:
        note = "The fastest lane that writes the plain lane's texts, for tasks with a required speed-up."
        yield "Aims", note, _aims(results, aimed)
    for task in tasks:
        rows = [_cells(result) for result in results if result.row.task == task]
        yield task.capitalize(), "", [list(_HEADER), *rows]
    if compared := compare_with_library(answers, pairs):
        yield "Compared with the library", BESIDE, _beside(compared)
    if overheads := round_overheads(answers):
        yield "Overhead of a round", WORK, _worked(overheads)


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


def _aims(results: list[LaneResult], tasks: list[str]) -> Rows:
    header = ["task", "aim", "fastest", "speed-up", "lanes that reach it"]
    lanes = [result for result in results if result.row.entrant != PLAIN and result.same and result.times]
    return [header, *(_aim(task, [lane for lane in lanes if lane.row.task == task]) for task in tasks)]


def _aim(task: str, lanes: list[LaneResult]) -> list[str]:
    fastest = max(lanes, key=lambda lane: lane.times.median, default=None)
    name, times = (fastest.row.entrant, fastest.times) if fastest else ("-", None)
    reaching = ", ".join(lane.row.entrant for lane in lanes if lane.reaches)
    return [task, f"{AIMS[task]:g}", name, spread_text(times, 2), reaching or "none"]


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


def _worked(overheads: list[RoundOverhead]) -> Rows:
    header = ["lane", "rounds", "draft tokens", "other forwards", "ms per round", "full rounds", "ms per full round",
              "too long"]
    return [header, *map(_overhead_cells, overheads)]


def _overhead_cells(lane: RoundOverhead) -> list[str]:
    return [
        lane.entrant,
        str(lane.rounds),
        number(lane.guesses, 0),
        number(lane.passes, 0),
        number(1000 * lane.seconds, 2),
        str(lane.full or "-"),
        number(None if lane.full_seconds is None else 1000 * lane.full_seconds, 2),
        "too long" if lane.too_long else "",
    ]
