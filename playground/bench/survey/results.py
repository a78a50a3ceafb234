"""Results of a survey: a row per entrant and task, and paired comparisons of two entrants on the same questions.

A score is a mean over questions. Rounds of one question are averaged first, since a deterministic strategy answers them
identically. Failed answers count as failures only, and questions that an entrant was not asked do not count at all.
Imports neither torch nor gradio.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from playground.bench.report_text import Rows, number, spread_text
from playground.bench.spread import Spread
from playground.bench.survey.survey import Answer

STOPPED = "with Ctrl-C after {} questions that all have answered"


class Score(NamedTuple):
    """Mean over questions, its standard error (None for a single question) and their number."""

    mean: float
    error: float | None
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        return cls(fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None, len(values))


def score_text(score: Score | None) -> str:
    """Mean ± standard error, if there is one."""
    if score is None:
        return "-"
    return number(score.mean, 3) + (f" ± {score.error:.3f}" if score.error is not None else "")


@dataclass(frozen=True)
class ResultRow:
    """One entrant on one task, over all its answers. Numbers that do not apply are None, such as acceptance without
    draft tokens.
    """

    entrant: str
    task: str
    answers: int  # that did not fail
    failed: int
    failure: str  # message of the first failure
    unasked: int  # questions it was not asked because they lack what it needs
    lacking: str  # what the first of these lacks
    score: Score | None
    tokens: float | None  # mean length of a text
    target_forwards: float | None  # per token after the first, prefill excluded; greedy decoding takes exactly 1
    other_forwards: float | None  # the same for all other streams together
    target_share: float | None  # share of the tokens that were chosen from the target's logits
    flops: float | None  # per token, prefill included
    tokens_per_second: Spread | None  # wall clock, prefill included, over the rounds
    time_ratio: Spread | None  # its seconds / the first entrant's, per round, on questions both answered in that round
    acceptance: float | None  # draft tokens accepted / tested
    acceptance_by_position: list[float | None]  # the same at each position of the draft, from 1
    same_text: int  # answers with exactly the first entrant's tokens
    compared: int  # answers that could be compared with the first entrant's
    kv_live: int | None  # maximum of live slots of any KV head after a commit, over all answers

    def to_json(self) -> dict[str, Any]:
        tuples = {name: value._asdict() for name, value in vars(self).items() if isinstance(value, (Score, Spread))}
        return asdict(self) | tuples


def table(answers: Iterable[Answer]) -> list[ResultRow]:
    """Task by task, entrants in the order of their first answers; the others are compared with the first of them."""
    answers = list(answers)
    entrants = list(dict.fromkeys(answer.entrant for answer in answers))
    tasks = list(dict.fromkeys(answer.question.task for answer in answers))
    of_task = {task: [answer for answer in answers if answer.question.task == task] for task in tasks}
    return [
        _row(select(of_task[task], name), select(of_task[task], entrants[0]))
        for task in tasks
        for name in entrants
        if select(of_task[task], name)
    ]


def answered_by_all(answers: Iterable[Answer], entrants: int) -> list[Answer]:
    """The answers to questions that all of so many entrants have answered in a round, if a survey was stopped."""
    answers = list(answers)
    counts = Counter((answer.number, answer.round) for answer in answers)
    return [answer for answer in answers if counts[answer.number, answer.round] == entrants]


def select(answers: Iterable[Answer], entrant: str) -> list[Answer]:
    return [answer for answer in answers if answer.entrant == entrant]


def _row(given: list[Answer], firsts: list[Answer]) -> ResultRow:
    answers, head = _complete(given), given[0]
    pairs = pairs_of(given, firsts)
    tokens, later = sum(_tokens(answer) for answer in answers), sum(max(0, _tokens(answer) - 1) for answer in answers)
    target = sum(answer.forwards.get("target", 0) for answer in answers)
    every = sum(sum(answer.forwards.values()) for answer in answers)
    wrote = sum(sum(answer.wrote.values()) for answer in answers)
    failures = [answer.failure for answer in given if answer.failure]
    lacking = [answer.lacking for answer in given if answer.lacking]
    return ResultRow(
        head.entrant,
        head.question.task,
        len(answers),
        len(failures),
        next(iter(failures), ""),
        len(lacking),
        next(iter(lacking), ""),
        score=_score(answers),
        tokens=_ratio(tokens, len(answers)),
        target_forwards=_ratio(target, later),
        other_forwards=_ratio(every - target, later),
        target_share=_ratio(sum(answer.wrote.get("target", 0) for answer in answers), wrote),
        flops=_ratio(sum(answer.flops for answer in answers), tokens),
        tokens_per_second=_speed(answers),
        time_ratio=time_ratio(given, firsts),
        acceptance=_acceptance(answers),
        acceptance_by_position=_by_position(answers),
        same_text=sum(one.token_ids == first.token_ids for one, first in pairs),
        compared=len(pairs),
        kv_live=max((answer.kv_live for answer in answers if answer.kv_live is not None), default=None),
    )


def time_ratio(answers: Iterable[Answer], firsts: Iterable[Answer]) -> Spread | None:
    """Seconds / the others' seconds within each round, over the questions that both answered in it."""
    rounds: dict[int, list[tuple[Answer, Answer]]] = defaultdict(list)
    for one, first in pairs_of(answers, firsts):
        rounds[one.round].append((one, first))
    ratios = [
        sum(one.seconds for one, _ in pairs) / sum(first.seconds for _, first in pairs) for pairs in rounds.values()
    ]
    return Spread.of(ratios) if ratios else None


def pairs_of(answers: Iterable[Answer], others: Iterable[Answer]) -> list[tuple[Answer, Answer]]:
    """Pairs of answers to the same question in the same round, neither of which failed."""
    found = {(other.number, other.round): other for other in _complete(others)}
    return [(answer, found[key]) for answer in _complete(answers) if (key := (answer.number, answer.round)) in found]


class Paired(NamedTuple):
    """Difference of two entrants' scores on the same questions."""

    mean: float  # mean difference per question
    error: float | None  # standard error of that mean
    better: int  # questions on which the first scores higher
    worse: int
    p: float  # of the two-sided sign test


def paired(answers: Iterable[Answer], others: Iterable[Answer]) -> Paired | None:
    """Compared on the questions that both have a score for; None if there are none."""
    ours, theirs = scores(answers), scores(others)
    gaps = [ours[number] - theirs[number] for number in ours if number in theirs]
    if not gaps:
        return None
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    mean = Score.of(gaps)
    return Paired(mean.mean, mean.error, better, worse, sign_test(better, worse))


def sign_test(better: int, worse: int) -> float:
    """Two-sided p value of a split under fair coin flips; 1 if both counts are 0."""
    count = better + worse
    tail = sum(comb(count, k) for k in range(min(better, worse) + 1)) / 2 ** count
    return min(1.0, 2 * tail)


def scores(answers: Iterable[Answer]) -> dict[int, float]:
    """Mean score over the rounds, by question number. Failed answers and unscored questions are left out."""
    found: dict[int, list[float]] = defaultdict(list)
    for answer in _complete(answers):
        if answer.score is not None:
            found[answer.number].append(answer.score)
    return {number: fmean(values) for number, values in found.items()}


def _score(answers: list[Answer]) -> Score | None:
    values = list(scores(answers).values())
    return Score.of(values) if values else None


def _speed(answers: list[Answer]) -> Spread | None:
    rounds: dict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        rounds[answer.round].append(answer)
    return (
        Spread.of([sum(map(_tokens, each)) / sum(answer.seconds for answer in each) for each in rounds.values()])
        if rounds
        else None
    )


def _acceptance(answers: list[Answer]) -> float | None:
    return _ratio(sum(answer.accepted for answer in answers), sum(answer.tested for answer in answers))


def _by_position(answers: list[Answer]) -> list[float | None]:
    deepest = max((len(answer.trials) for answer in answers), default=0)
    at = [[answer.trials[depth] for answer in answers if depth < len(answer.trials)] for depth in range(deepest)]
    return [_ratio(sum(accepted for accepted, _ in each), sum(tested for _, tested in each)) for each in at]


def _complete(answers: Iterable[Answer]) -> list[Answer]:
    return [answer for answer in answers if not (answer.failure or answer.lacking)]


def _tokens(answer: Answer) -> int:
    return len(answer.token_ids)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# The columns of tables, on a terminal and on a page.

SHOWN = 5  # positions of a draft that a table shows


def by_position(row: ResultRow) -> str:
    """Acceptance at the first positions of the draft."""
    return " ".join(number(share, 2) for share in row.acceptance_by_position[:SHOWN]) or "-"


COLUMNS: dict[str, Callable[[ResultRow], str]] = {
    "entrant": lambda row: row.entrant,
    "score": lambda row: score_text(row.score),
    "tokens": lambda row: number(row.tokens, 0),
    "target forwards per token": lambda row: number(row.target_forwards, 2),
    "other forwards": lambda row: number(row.other_forwards, 2),
    "tokens/s": lambda row: spread_text(row.tokens_per_second, 1),
    "time": lambda row: spread_text(row.time_ratio, 2),
    "accepted": lambda row: number(row.acceptance, 2),
    "by position": by_position,
    "live slots": lambda row: number(row.kv_live, 0),
    "same text": lambda row: f"{row.same_text} of {row.compared}" if row.answers or row.failed else "-",
    "failed": lambda row: str(row.failed) if row.failed else "",
}


class Section(NamedTuple):
    """The table of one task."""

    task: str
    remarks: list[str]  # explains rows of dashes
    rows: Rows


def sections(rows: Sequence[ResultRow]) -> list[Section]:
    of_task = {task: [row for row in rows if row.task == task] for task in dict.fromkeys(row.task for row in rows)}
    return [
        Section(task, unasked(some), [list(COLUMNS), *([cell(row) for cell in COLUMNS.values()] for row in some)])
        for task, some in of_task.items()
    ]


def unasked(rows: Iterable[ResultRow]) -> list[str]:
    """One sentence about the entrants that could not be asked a task's questions; empty if there are none."""
    needing: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.unasked:
            asked = row.answers + row.failed
            needing[row.lacking].append(
                f"{row.entrant} ({row.unasked} of {row.unasked + asked} answers)" if asked else row.entrant
            )
    missing = "; ".join(f"{lacking} for {', '.join(names)}" for lacking, names in needing.items())
    return [f"Not asked, since the questions lack inputs: {missing}."] if missing else []
