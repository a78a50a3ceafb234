"""The findings as plain data, as tables for a terminal and as a page."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from playground.bench.results import SHOWN, number, spread
from playground.bench.speculation.findings import (
    FULL,
    MOST_WORK,
    LaneResult,
    Match,
    RoundOverhead,
    matches,
    standings,
    works,
)
from playground.bench.speculation.observe import Guessed
from playground.bench.speculation.speculative_lanes import AIMS, PLAIN, Pair
from playground.bench.survey_export import facts_table, markdown

Rows = list[list[str]]
FORMAT, VERSION = "decoding-playground-guessing", 1
NOTES = """Every lane wrote an answer to every question by itself, in one process, in turn, round after round; who begins moves on from question
to question, and a warm-up was dropped. All decode greedily, so each text is the plain lane's, and *same text* counts how many were.
*Times as fast*: the plain lane's seconds by the wall clock over the lane's own, prompt and recording included, within each round; median
(lowest to highest) of the rounds. *Tokens per target forward*: tokens after the first over passes of the target, the prompt's left out,
so that plain decoding gives 1. *Accepted*: guesses that stood over those tested, in all and by their depth in the draft. Nothing is
remembered from one question to the next. A strategy whose knobs are not named has its own defaults."""
BESIDE = """The library's `generate` on the same weights in a network without our seams, guessing as many tokens at a time with the same
draft or the same longest ending. It gets its prompt as ids, ours count its encoding. It guesses in the prompt's own pass already,
which is not counted among the passes. *Ours / theirs*: how many times as fast ours is."""
WORK = f"""Over all tasks: the median of a round's guesses, and of the milliseconds of the lane's clock between two passes of the target in which no
forward of any model ran: drafting, trees, the verdict, keeping and recording. *Other passes* are those of a draft or of early layers: what is
done around each counts as well, so that guesses far below one another, each of which needs the pass of the one above it, cost the most.
*Full rounds* are those of {FULL[0]} to {FULL[1]} guesses, and {1000 * MOST_WORK:g} ms are the most they may take."""


def document(facts: dict[str, Any], answers: Sequence[Guessed], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Plain data for JSON. facts: settings and machine."""
    failed = list(dict.fromkeys(f"{answer.entrant}: {answer.failure}" for answer in answers if answer.failure))
    return {
        "format": FORMAT,
        "version": VERSION,
        **facts,
        "aims": AIMS,
        "table": [found.to_json() for found in standings(answers)],
        "library": [found.to_json() for found in matches(answers, pairs)],
        "work": [found.to_json() for found in works(answers)],
        "failures": failed,
    }


def page(facts: dict[str, Any], answers: Sequence[Guessed], pairs: Sequence[Pair]) -> str:
    """The tables in Markdown, with the command and what they were measured on."""
    parts = [
        "# Guessing ahead",
        "Made by `python -m playground bench guessing --out --page`.",
        NOTES,
        facts_table(facts),
    ]
    for title, note, rows in sections(answers, pairs):
        parts += [f"## {title}", *[note] * bool(note), markdown(rows)]
    return "\n\n".join(parts) + "\n"


def sections(answers: Sequence[Guessed], pairs: Sequence[Pair]) -> Iterator[tuple[str, str, Rows]]:
    """Title, note and table: the aims, the tasks, the library, the work."""
    found = standings(answers)
    tasks = list(dict.fromkeys(standing.row.task for standing in found))
    if aimed := [task for task in tasks if task in AIMS]:
        yield (
            "Aims",
            "The fastest lane that writes the plain lane's texts, where a speed is asked for.",
            _aims(found, aimed),
        )
    for task in tasks:
        yield (
            task.capitalize(),
            "",
            [list(_HEAD), *(_cells(standing) for standing in found if standing.row.task == task)],
        )
    if compared := matches(answers, pairs):
        yield "Beside the library", BESIDE, _beside(compared)
    if worked := works(answers):
        yield "Work of a round", WORK, _worked(worked)


_HEAD = (
    "lane",
    "times as fast",
    "aim",
    "tokens per target forward",
    "accepted",
    "by depth",
    "other forwards a token",
    "same text",
    "failed",
)


def _cells(standing: LaneResult) -> list[str]:
    row = standing.row
    by_depth = " ".join(number(share, 2) for share in row.acceptance_by_position[:SHOWN]) or "-"
    return [
        row.entrant,
        spread(standing.times, 2),
        f"reaches {AIMS[row.task]:g}" if standing.reaches else "",
        number(standing.tokens_per_target_forward, 2),
        number(row.acceptance, 2),
        by_depth,
        number(row.other_forwards, 2),
        f"{row.same_text} of {row.compared}",
        str(row.failed or ""),
    ]


def _aims(found: list[LaneResult], tasks: list[str]) -> Rows:
    rows = [["task", "aim", "fastest", "times as fast", "lanes that reach it"]]
    for task in tasks:
        lanes = [
            standing
            for standing in found
            if standing.row.task == task and standing.row.entrant != PLAIN and standing.same and standing.times
        ]
        fastest = max(lanes, key=lambda standing: standing.times.median, default=None)
        reaching = ", ".join(standing.row.entrant for standing in lanes if standing.reaches)
        rows.append(
            [
                task,
                f"{AIMS[task]:g}",
                fastest.row.entrant if fastest else "-",
                spread(fastest.times if fastest else None, 2),
                reaching or "none",
            ]
        )
    return rows


def _beside(compared: list[Match]) -> Rows:
    head = [
        "ours",
        "theirs",
        "task",
        "ours / theirs",
        "accepted",
        "theirs",
        "tokens per target forward",
        "theirs",
        "same text",
        "short of it",
    ]
    return [
        head,
        *(
            [
                match.pair.ours,
                match.pair.theirs,
                match.task,
                spread(match.times, 2),
                *(number(share, 2) for share in match.accepted),
                *(number(tokens, 2) for tokens in match.per_forward),
                f"{match.same_text} of {match.compared}",
                _short(match),
            ]
            for match in compared
        ),
    ]


def _short(match: Match) -> str:
    return ", ".join(
        words for words, holds in (("slower", match.slower), ("accepts less", match.accepts_less)) if holds
    )


def _worked(worked: list[RoundOverhead]) -> Rows:
    rows = [["lane", "rounds", "guesses", "other passes", "ms a round", "full rounds", "ms a full round", "too long"]]
    return rows + [
        [
            work.entrant,
            str(work.rounds),
            number(work.guesses, 0),
            number(work.passes, 0),
            number(1000 * work.seconds, 2),
            str(work.full or "-"),
            number(None if work.full_seconds is None else 1000 * work.full_seconds, 2),
            "too long" if work.too_long else "",
        ]
        for work in worked
    ]
