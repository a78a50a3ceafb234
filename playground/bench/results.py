"""What a survey came to: a row for each entrant and task, and two entrants held against each other on the same
questions.

A score is a mean over questions; rounds of one question are averaged first, since a strategy that draws nothing answers
them alike. Answers that failed count as such and nowhere else, and questions that an entrant was not asked count
nowhere. Imports neither torch nor gradio.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from playground.bench.spread import Spread
from playground.bench.survey import Answer


class Score(NamedTuple):
    """Mean over questions, its standard error (None for a single question) and their number."""

    mean: float
    error: float | None
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        return cls(fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class ResultRow:
    """One entrant on one task, over all its answers. None where a number has no meaning, as acceptance where nothing
    was guessed.
    """

    entrant: str
    task: str
    answers: int  # those that came through
    failed: int
    failure: str  # the first sentence that says why one failed
    unasked: int  # those that it was not asked, because a question lacked what it needs
    lacking: str  # what that is, of the first one
    score: Score | None
    tokens: float | None  # of a text, mean
    # for each token after the first, which prefill gives; greedy decoding takes exactly 1
    target_forwards: float | None
    other_forwards: float | None  # the same for all other streams together
    target_share: float | None  # of the tokens, those chosen from a row of the target
    flops: float | None  # for each token, prefill included
    tokens_per_second: Spread | None  # wall clock, prefill included, round by round
    # its seconds over the first entrant's, on the questions that both answered in one round, round by round
    time_ratio: Spread | None
    acceptance: float | None  # guesses accepted over tested
    acceptance_by_position: list[float | None]  # the same at each depth of the draft, from 1
    same_text: int  # answers with exactly the first entrant's tokens
    compared: int  # answers that could be compared with it
    kv_live: int | None  # most live slots of any KV head after a keep, the largest of all answers

    def to_json(self) -> dict[str, Any]:
        tuples = {name: value._asdict() for name, value in vars(self).items() if isinstance(value, (Score, Spread))}
        return asdict(self) | tuples


def table(answers: Iterable[Answer]) -> list[ResultRow]:
    """Task by task, the entrants in the order in which they first answered; the first of them is what others are held
    against.
    """
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


def select(answers: Iterable[Answer], entrant: str) -> list[Answer]:
    return [answer for answer in answers if answer.entrant == entrant]


def _row(given: list[Answer], firsts: list[Answer]) -> ResultRow:
    answers, head = _fine(given), given[0]
    pairs = pairs_of(given, firsts)
    tokens, later = sum(_tokens(answer) for answer in answers), sum(max(0, _tokens(answer) - 1) for answer in answers)
    target = sum(answer.forwards.get("target", 0) for answer in answers)
    every = sum(sum(answer.forwards.values()) for answer in answers)
    wrote = sum(sum(answer.wrote.values()) for answer in answers)
    failures, lacking = ([said for answer in given if (said := getattr(answer, why))] for why in ("failure", "lacking"))
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
    """Seconds over the others' seconds within each round, over the questions that both answered in it."""
    rounds: dict[int, list[tuple[Answer, Answer]]] = defaultdict(list)
    for one, first in pairs_of(answers, firsts):
        rounds[one.round].append((one, first))
    ratios = [
        sum(one.seconds for one, _ in pairs) / sum(first.seconds for _, first in pairs) for pairs in rounds.values()
    ]
    return Spread.of(ratios) if ratios else None


def pairs_of(answers: Iterable[Answer], others: Iterable[Answer]) -> list[tuple[Answer, Answer]]:
    """Answers to the same question in the same round, where both came through."""
    found = {(other.number, other.round): other for other in _fine(others)}
    return [(answer, found[place]) for answer in _fine(answers) if (place := (answer.number, answer.round)) in found]


class Paired(NamedTuple):
    """How much better one entrant scores than another on the same questions."""

    mean: float  # of the differences, question by question
    error: float | None  # standard error of that mean
    better: int  # questions on which the first scores higher
    worse: int
    p: float  # two-sided sign test: how likely so uneven a split is if neither were better


def paired(answers: Iterable[Answer], others: Iterable[Answer]) -> Paired | None:
    """Over the questions that both have a score for; None where there is none."""
    ours, theirs = scores(answers), scores(others)
    gaps = [ours[number] - theirs[number] for number in ours if number in theirs]
    if not gaps:
        return None
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    whole = Score.of(gaps)
    return Paired(whole.mean, whole.error, better, worse, sign_test(better, worse))


def sign_test(better: int, worse: int) -> float:
    """Two-sided p of a split between coin flips; 1 where there is nothing to split."""
    count = better + worse
    tail = sum(comb(count, k) for k in range(min(better, worse) + 1)) / 2 ** count
    return min(1.0, 2 * tail)


def scores(answers: Iterable[Answer]) -> dict[int, float]:
    """By number of the question, mean over its rounds; failed answers and questions without a known answer are left
    out.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for answer in _fine(answers):
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


def _fine(answers: Iterable[Answer]) -> list[Answer]:
    return [answer for answer in answers if not (answer.failure or answer.lacking)]


def _tokens(answer: Answer) -> int:
    return len(answer.token_ids)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# In words: the same columns on a terminal and on a page.

SHOWN = 5  # positions of a draft that a table has room for

def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def spread(values: Spread | None, digits: int) -> str:
    """Median, lowest and highest; the median alone of a single round."""
    if values is None:
        return "-"
    around = f" ({values.low:.{digits}f} to {values.high:.{digits}f})" if values.low < values.high else ""
    return f"{values.median:.{digits}f}{around}"


def told(score: Score | None) -> str:
    """A mean with its standard error, where it has one."""
    if score is None:
        return "-"
    return f"{score.mean:.3f} ± {score.error:.3f}" if score.error is not None else f"{score.mean:.3f}"


COLUMNS: dict[str, Callable[[ResultRow], str]] = {
    "entrant": lambda row: row.entrant,
    "score": lambda row: told(row.score),
    "tokens": lambda row: number(row.tokens, 0),
    "target forwards a token": lambda row: number(row.target_forwards, 2),
    "other forwards": lambda row: number(row.other_forwards, 2),
    "tokens/s": lambda row: spread(row.tokens_per_second, 1),
    "time": lambda row: spread(row.time_ratio, 2),
    "accepted": lambda row: number(row.acceptance, 2),
    "by position": lambda row: " ".join(number(share, 2) for share in row.acceptance_by_position[:SHOWN]) or "-",
    "live slots": lambda row: number(row.kv_live, 0),
    "same text": lambda row: f"{row.same_text} of {row.compared}" if row.answers or row.failed else "-",
    "failed": lambda row: str(row.failed) if row.failed else "",
}


class Section(NamedTuple):
    """What is told of one task."""

    task: str
    remarks: list[str]  # a sentence above the table where there are dashes in it to explain
    rows: list[list[str]]  # the table, its head first


def sections(rows: Sequence[ResultRow]) -> list[Section]:
    of_task = {task: [row for row in rows if row.task == task] for task in dict.fromkeys(row.task for row in rows)}
    return [
        Section(task, unasked(these), [list(COLUMNS), *([cell(row) for cell in COLUMNS.values()] for row in these)])
        for task, these in of_task.items()
    ]


def unasked(rows: Iterable[ResultRow]) -> list[str]:
    """One sentence about the entrants that a task's questions could not be put to; none where there were no such."""
    needing: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.unasked:
            asked = row.answers + row.failed
            needing[row.lacking].append(
                f"{row.entrant} ({row.unasked} of {row.unasked + asked} answers)" if asked else row.entrant
            )
    told = "; ".join(f"{', '.join(names)} for want of {lacking}" for lacking, names in needing.items())
    return [f"Not asked, for these questions do not bring it: {told}."] if told else []
