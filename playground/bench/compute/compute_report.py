"""Score against the share of FLOPs and of wall-clock time, as tables, a chart and plain data.

The share of FLOPs of an answer is what it cost, divided by what a plain lane computes for a text of that length. Times
are compared question by question, where both lanes wrote equally many tokens.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from playground.bench.charts import Chart
from playground.bench.compute.compute_lanes import PLAIN, policy_of
from playground.bench.report_text import Rows, facts_table, markdown, markdown_page, number
from playground.bench.survey.results import Score, pairs_of, score_text, select
from playground.bench.survey.survey import Answer, prompt_of

if TYPE_CHECKING:
    from playground.decoding.models import Models

FORMAT, VERSION = "decoding-playground-compute", 1
LOSS, SHARE, TASKS = 0.03, 0.7, 4  # the aim: at most so much score lost at below this share of FLOPs, on so many tasks
TENTHS = 10
WHY_NOT = {  # what keeps a policy from the aim on a model of few layers
    "evopress": "it drops whole blocks, of which eight layers have few to spare, and trains nothing afterwards",
    "ffn_skip": "only layers in the middle may be skipped, which is less than a tenth of the FLOPs",
    "first_router": "a layer is an eighth of the network and is left out for every token of a text",
    "ftp": "it prunes the prompt alone, so that a generated token costs as much as before",
    "stop_exit": "at thresholds that keep the answers few tokens leave early",
}
NOTES = f"""*Score*: 1 for a right answer, mean over held-out questions ± one standard error. *FLOPs*: of all forwards,
prefill included, divided by those of plain decoding for a text of the same length; they are computed from what was
multiplied. *Time*: wall-clock seconds divided by those of plain decoding, summed over the questions to which both lanes
wrote equally many tokens; their number is in brackets. The aim is a share of FLOPs below {SHARE} at a loss of at most
{LOSS} on at least {TASKS} tasks."""


@dataclass(frozen=True)
class ComputeRow:
    """One lane on one task."""

    lane: str
    task: str
    score: Score | None
    flops: float | None  # share of what plain decoding computes for texts of the same lengths
    seconds: float | None  # share of plain decoding's, over texts of the same length
    compared: int  # questions behind `seconds`


class PlainCost:
    """What plain decoding computes for an answer of the same length."""

    def __init__(self, models: Models):
        self._models = models
        self._prompts: dict[int, int] = {}  # tokens of the prompt, by question number

    def flops(self, answer: Answer) -> float:
        """FLOPs of the prompt and of one forward for every token after the first."""
        model = self._models.target
        if answer.number not in self._prompts:
            self._prompts[answer.number] = len(prompt_of(answer.question, self._models).encode(model))
        prompt, depth = self._prompts[answer.number], model.depth
        later = range(prompt, prompt + len(answer.token_ids) - 1)
        return model.flops(prompt, 0, depth) + sum(model.flops(1, context, depth) for context in later)


def table(answers: list[Answer], models: Models) -> list[ComputeRow]:
    """A row for each lane and task, lanes in the order of their first answers."""
    cost, lanes = PlainCost(models), dict.fromkeys(answer.entrant for answer in answers)
    tasks = dict.fromkeys(answer.question.task for answer in answers)
    by_task = {task: [answer for answer in answers if answer.question.task == task] for task in tasks}
    return [_row(select(by_task[task], lane), select(by_task[task], PLAIN), cost) for lane in lanes for task in tasks]


def _row(given: list[Answer], plain: list[Answer], cost: PlainCost) -> ComputeRow:
    whole = [answer for answer in given if not answer.failure]
    values = [answer.score for answer in whole if answer.score is not None]
    same = [(one, other) for one, other in pairs_of(given, plain) if len(one.token_ids) == len(other.token_ids)]
    return ComputeRow(
        given[0].entrant,
        given[0].question.task,
        Score.of(values) if values else None,
        _share(sum(answer.flops for answer in whole), sum(map(cost.flops, whole))),
        _share(sum(one.seconds for one, _ in same), sum(other.seconds for _, other in same)),
        len(same),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def reached(rows: list[ComputeRow], lane: str) -> list[str]:
    """Tasks on which a lane meets the aim."""
    plain = {row.task: row.score for row in rows if row.lane == PLAIN}
    return [
        row.task
        for row in rows
        if row.lane == lane and row.score and plain[row.task] and row.flops < SHARE
        and row.score.mean >= plain[row.task].mean - LOSS
    ]


def overview(rows: list[ComputeRow]) -> Rows:
    """A line per lane: means over the tasks, and the tasks on which the aim is met."""
    lines: Rows = [["lane", "score", "FLOPs", "time", "tasks at the aim"]]
    tasks = {row.task for row in rows}
    for lane in dict.fromkeys(row.lane for row in rows):
        own = [row for row in rows if row.lane == lane]
        met, shown = reached(rows, lane), lane
        if len(own) < len(tasks):
            shown = f"{lane}, on {len(own)} of {len(tasks)} tasks"
        lines.append([shown, _mean(row.score and row.score.mean for row in own), _mean(row.flops for row in own),
                      _mean(row.seconds for row in own), f"{len(met)}: {', '.join(met)}" if met else "0"])
    return lines


def _mean(values: Any) -> str:
    known = [value for value in values if value is not None]
    return number(fmean(known) if known else None, 3)


def by_task(rows: list[ComputeRow], task: str) -> Rows:
    """A line per lane on one task."""
    lines: Rows = [["lane", "score", "FLOPs", "time"]]
    for row in rows:
        if row.task == task:
            seconds = f"{number(row.seconds, 2)} ({row.compared})"
            lines.append([row.lane, score_text(row.score), number(row.flops, 3), seconds])
    return lines


def findings(rows: list[ComputeRow]) -> str:
    """Which policies meet the aim, and whether fewer FLOPs took less time, in sentences."""
    tasks, every = {row.task for row in rows}, dict.fromkeys(row.lane for row in rows if row.lane != PLAIN)
    lanes = [lane for lane in every if sum(row.lane == lane for row in rows) == len(tasks)]
    partial = [lane for lane in every if lane not in lanes]
    most = {lane: len(reached(rows, lane)) for lane in lanes}
    met = [f"`{lane}` on {count} tasks" for lane, count in most.items() if count >= TASKS]
    missing = [name for name in dict.fromkeys(map(policy_of, lanes))
               if not any(most[lane] >= TASKS for lane in lanes if policy_of(lane) == name)]
    slower = [lane for lane in lanes if _mean_of(rows, lane) > 1]
    return " ".join([
        f"The aim is met by {', '.join(met)}." if met else "No policy meets the aim.",
        *(f"No setting of `{name}` meets it" + (f": {WHY_NOT[name]}." if name in WHY_NOT else ".") for name in missing),
        f"Of {len(lanes)} lanes {len(slower)} took longer than plain decoding although they compute less: a small "
        "network spends most of its time between matrix products, where the policies decide and their figures are made."
        if slower else "",
        f"On some tasks only: {', '.join(f'`{lane}`' for lane in partial)}." if partial else "",
    ]).strip()


def _mean_of(rows: list[ComputeRow], lane: str) -> float:
    """Mean share of the time over the tasks of a lane; 0 if none could be compared."""
    known = [row.seconds for row in rows if row.lane == lane and row.seconds is not None]
    return fmean(known) if known else 0.0


def chart(rows: list[ComputeRow]) -> Chart:
    """Mean score over the tasks against the mean share of FLOPs; every curve ends at plain decoding.

    Lanes that were not measured on all tasks are left out.
    """
    lanes, tasks = dict.fromkeys(row.lane for row in rows), {row.task for row in rows}
    each = {lane: [row for row in rows if row.lane == lane] for lane in lanes}
    points = {lane: _point(own) for lane, own in each.items() if len(own) == len(tasks)}
    plain, curves = points.pop(PLAIN), {}
    for lane, point in points.items():
        curves.setdefault(policy_of(lane), []).append(point)
    ordered = {name: sorted([*curve, plain]) for name, curve in curves.items()}
    return Chart(
        "Less work for a token",
        "share of the FLOPs",
        "mean score over the tasks",
        [f"{tenth / TENTHS:g}" for tenth in range(1, TENTHS + 1)],
        {name: [(score, 0.0) for _, score in curve] for name, curve in ordered.items()},
        at={name: [TENTHS * flops - 1 for flops, _ in curve] for name, curve in ordered.items()},
    )


def _point(rows: list[ComputeRow]) -> tuple[float, float]:
    scores = [row.score.mean for row in rows if row.score]
    return fmean(row.flops for row in rows if row.flops), fmean(scores) if scores else 0.0


def read_row(line: dict[str, Any]) -> ComputeRow:
    """A row of the document."""
    return ComputeRow(**line | {"score": line["score"] and Score(**line["score"])})


def document(facts: dict[str, Any], rows: list[ComputeRow]) -> dict[str, Any]:
    """Plain data for JSON. facts: settings and machine."""
    lines = [asdict(row) | {"score": row.score and row.score._asdict()} for row in rows]
    return {"format": FORMAT, "version": VERSION, **facts, "rows": lines}


def page(facts: dict[str, Any], rows: list[ComputeRow], picture: str) -> str:
    """The tables in Markdown; the chart is in a file next to the page."""
    tasks = dict.fromkeys(row.task for row in rows)
    return markdown_page(
        "# Less work for a token",
        "Made by `python -m playground bench compute --out --page`.",
        NOTES,
        markdown(overview(rows)),
        f"![score against FLOPs]({picture})",
        findings(rows),
        facts_table(facts),
        *(f"## {task}\n\n{markdown(by_task(rows, task))}" for task in tasks),
    )
