"""Runs strategies on questions and records each answer's score and cost.

Every entrant answers every question in a session with one lane, interleaved round by round, so that other load on the
machine affects all of them; the order rotates from question to question. All fields of an answer come from the lane's
trace, except the wall-clock seconds. Imports neither torch nor gradio before the first question is asked.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from playground.algorithms.programs.sandbox import NotRun
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.errors import Refusal
from playground.questions.question_inputs import Lacking, bare, filled
from playground.questions.questions import Question, judge
from playground.questions.user_questions import is_own, own_score
from playground.trace.lane_metrics import LaneRecord
from playground.trace.result import Result

if TYPE_CHECKING:
    from playground.decoding.limits import Limits
    from playground.decoding.models import Models
    from playground.decoding.prompt import Prompt
    from playground.decoding.session import Session

ROUNDS = 1000  # exclusive upper bound of the rounds: keeps the seeds of two questions distinct
Judge = Callable[[Question, str], float | None]


@dataclass(frozen=True)
class Entrant:
    """A strategy under the name it has in tables."""

    name: str
    config: LaneConfig

    def config_for(self, question: Question) -> LaneConfig:
        """The config for this question: knobs such as {labels} take its values. Raises Lacking if it has none."""
        return filled(self.config, question)

    def assembly(self) -> Assembly:
        """The entrant before any question is known; raises Refusal if it could never run."""
        return assemble(bare(self.config))


class Asked(NamedTuple):
    """One question for one entrant."""

    entrant: Entrant
    number: int  # of the question, from 0
    question: Question
    round: int  # from 1; 0 is the warm-up

    def seed(self, given: int) -> int:
        """Seed of the session: the same for all entrants, different for each question and round."""
        own = self.entrant.config.seed
        return (given if own is None else own) + self.number * ROUNDS + self.round


@dataclass(frozen=True)
class Answer:
    """An entrant's answer to a question in one round."""

    entrant: str
    number: int  # of the question, from 0
    question: Question
    round: int  # from 1
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # of the text, a committed end token included
    score: float | None = None  # 0 to 1; None if the right answer is unknown or the lane failed
    seconds: float = 0.0  # wall clock from the text of the prompt to the last event, without time spent on other work
    clock: float = 0.0  # seconds of the lane's own clock, prefill included
    forwards: dict[str, int] = field(default_factory=dict)  # by stream, such as target and draft; prefill excluded
    wrote: dict[str, int] = field(default_factory=dict)  # tokens by the stream whose logits they were chosen from
    trials: list[tuple[int, int]] = field(default_factory=list)  # draft tokens (accepted, tested) by position, from 1
    flops: float = 0.0  # of all forwards, computed from their shapes, prefill included
    kv_live: int | None = None  # maximum of live slots of any KV head of the target after a commit
    reason: str = "failed"  # why the text ended
    failure: str = ""  # error message; empty if nothing failed
    lacking: str = ""  # what the entrant needs and the question lacks, so that it was not asked; empty if it was

    @property
    def accepted(self) -> int:
        return sum(accepted for accepted, _ in self.trials)

    @property
    def tested(self) -> int:
        return sum(tested for _, tested in self.trials)


def score(question: Question, text: str) -> float | None:
    """Score of a text, 0 to 1; None if the answer is unknown, or a program was not run for it.

    A user's own question is scored by its own rule.
    """
    try:
        return own_score(question, text) if is_own(question) else judge(question, text)
    except NotRun:
        return None


def survey(
    models: Models,
    entrants: Sequence[Entrant],
    questions: Sequence[Question],
    repeats: int,
    limits: Limits,
    cancelled: Callable[[], bool] = lambda: False,
    *,
    judge: Judge = score,
    warm_up: bool = True,
) -> Iterator[Answer]:
    """Yields answers as they are finished. If a lane fails, or the question lacks what it needs, its answer says so and
    the others continue.

    For the warm-up, every entrant answers the first question of each task, and these answers are dropped; `warm_up` can
    be False if times do not matter. `cancelled` is called after every forward, and an unfinished answer is dropped.
    Raises Refusal if there is nothing to do.
    """
    for answer in steps(models, entrants, questions, repeats, limits, judge=judge, warm_up=warm_up):
        if cancelled():
            return
        if answer:
            yield answer


def steps(models: Models, entrants: Sequence[Entrant], questions: Sequence[Question], repeats: int, limits: Limits, *,
          judge: Judge = score, warm_up: bool = True) -> Iterator[Answer | None]:
    """The same survey one forward at a time, so that a caller can do other work in between: yields None after each
    forward, and the answers as they are finished.

    An answer's seconds exclude time spent in the caller. Closing the iterator stops the running lane.
    """
    return rounds(Examiner(models, limits, judge), entrants, questions, repeats, warm_up)


def rounds(
    examiner: Examiner, entrants: Sequence[Entrant], questions: Sequence[Question], repeats: int, warm_up: bool = True
) -> Iterator[Answer | None]:
    """Ask every entrant every question through `examiner`: yields None after each forward, and answers as they are
    finished.
    """
    _check(entrants, questions, repeats)
    for asked in [*(_warm_up(entrants, questions) if warm_up else []), *_schedule(entrants, questions, repeats)]:
        results = examiner.ask(asked)
        yield from results if asked.round else (None for _ in results)


def _check(entrants: Sequence[Entrant], questions: Sequence[Question], repeats: int) -> None:
    names = [entrant.name for entrant in entrants]
    if not names:
        raise Refusal("There is no strategy to measure: name one.", "entrants")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Refusal(
            f"Two strategies are called {twice}: rename one, so that tables can tell them apart.",
            "entrants",
        )
    if not questions:
        raise Refusal("There is no question to ask: choose a task, or add questions of your own.", "questions")
    if not 1 <= repeats < ROUNDS:
        raise Refusal(f"The number of rounds must be between 1 and {ROUNDS - 1}, not {repeats}.", "repeats")


def check_entrants(examiner: Examiner, entrants: Sequence[Entrant], questions: Sequence[Question]) -> None:
    """Raise Refusal for the first entrant that the models cannot run; the first question of each task is tried."""
    for number, entrant in enumerate(entrants, 1):
        problems = [examiner.problem(asked) for asked in _warm_up([entrant], questions)]
        if all(problems):
            raise Refusal(f"Lane {number} cannot start. {problems[0]}", "entrants")


def _warm_up(entrants: Sequence[Entrant], questions: Sequence[Question]) -> Iterator[Asked]:
    first = {question.task: number for number, question in reversed([*enumerate(questions)])}
    return (Asked(entrant, number, questions[number], 0) for number in sorted(first.values()) for entrant in entrants)


def _schedule(entrants: Sequence[Entrant], questions: Sequence[Question], repeats: int) -> Iterator[Asked]:
    """The order rotates from question to question, so that no entrant always follows the same other."""
    for round in range(1, repeats + 1):
        for number, question in enumerate(questions):
            begins = (round - 1 + number) % len(entrants)
            yield from (Asked(entrant, number, question, round) for entrant in [*entrants[begins:], *entrants[:begins]])


@dataclass(frozen=True)
class Examiner:
    """Asks one question at a time."""

    models: Models
    limits: Limits
    judge: Judge

    def ask(self, asked: Asked) -> Iterator[Answer | None]:
        """Yields None after every forward, then the answer."""
        blank, watch = (
            Answer(asked.entrant.name, asked.number, asked.question, asked.round, asked.seed(self.limits.seed)),
            Stopwatch(),
        )
        try:
            config = self._config(asked)
            with watch:
                session = self._session(asked, config)
        except Lacking as lacking:
            yield replace(blank, lacking=str(lacking), reason="not asked")
            return
        except Refusal as refusal:
            yield replace(blank, failure=str(refusal))
            return
        yield from _forwards(session, watch)
        yield self._read(replace(blank, seconds=watch.seconds), Result(session.trace))

    def problem(self, asked: Asked) -> str:
        """Why the models cannot run an entrant; empty if they can, or if only this question cannot be asked."""
        try:
            session = self._session(asked, self._config(asked))
        except Refusal:  # the question lacks an input or is too long
            return ""
        session.stop()
        return Result(session.trace).message

    def _config(self, asked: Asked) -> LaneConfig:
        """The config for this question; raises Lacking if the question does not have what the entrant needs."""
        config = replace(asked.entrant.config_for(asked.question), seed=None)
        if "context" in assemble(config).needs() and not asked.question.context.strip():
            raise Lacking("a passage", "context")
        return config

    def _session(self, asked: Asked, config: LaneConfig) -> Session:
        from playground.decoding.session import prepare  # late, since it imports torch
        limits = replace(self.limits, seed=asked.seed(self.limits.seed))
        return prepare(self.models, [config], prompt_of(asked.question, self.models), limits)

    def _read(self, blank: Answer, result: Result) -> Answer:
        """The answer from the trace. A text cut short by a failure is not scored."""
        found, record = result.metrics, LaneRecord(result.trace.events)
        known = None if result.message else self.judge(blank.question, result.text)
        return replace(
            blank,
            text=result.text,
            token_ids=result.token_ids,
            score=known,
            clock=found["seconds"],
            forwards=found["forwards"],
            wrote=_wrote(record),
            trials=_trials(record),
            flops=found["flops"],
            kv_live=found["kv_live_peak"],
            reason=result.reason,
            failure=result.message,
        )


class Stopwatch:
    """Accumulates the seconds spent inside its `with` statements."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *raised: object) -> None:
        self.seconds += perf_counter() - self._start


def _forwards(session: Session, watch: Stopwatch) -> Iterator[None]:
    """Run a session to its end, yielding None after each step; closing the iterator stops the session."""
    try:
        while not session.finished:
            with watch:
                session.advance()
            yield None
    finally:
        session.stop()


def prompt_of(question: Question, models: Models) -> Prompt:
    """The question as a session's prompt; a chat only if the model has a chat template."""
    from playground.decoding.prompt import Prompt
    chat = question.chat and bool(models.target.tokenizer.chat_template)
    return Prompt(question.prompt, chat, context=question.context, before=question.before)


def _wrote(record: LaneRecord) -> dict[str, int]:
    steps = record.written.steps
    return dict(Counter(steps[position].stream for position in range(len(record.written.tokens)) if position in steps))


def _trials(record: LaneRecord) -> list[tuple[int, int]]:
    fates: dict[int, list[bool]] = defaultdict(list)
    for depth, kept in record.trials():
        fates[depth].append(kept)
    return [(sum(fates[depth]), len(fates[depth])) for depth in range(1, max(fates, default=0) + 1)]


class Progress:
    """Progress of a survey and an estimate of the remaining time, from each entrant's mean time per task so far."""

    def __init__(self, entrants: Sequence[Entrant], questions: Sequence[Question], repeats: int):
        self._waiting = Counter(
            (entrant.name, question.task) for entrant in entrants for question in questions for _ in range(repeats)
        )
        self._total, self._seconds = self._waiting.total(), defaultdict(list)

    def count(self, answer: Answer) -> None:
        kind = answer.entrant, answer.question.task
        self._waiting[kind] -= 1
        self._seconds[kind].append(answer.seconds)

    @property
    def share(self) -> float:
        """Share of all answers that are finished, 0 to 1."""
        return 1 - self._waiting.total() / self._total

    @property
    def left(self) -> float | None:
        """Estimated seconds left; None until every entrant still to answer a task has answered it once."""
        waiting = {kind: count for kind, count in self._waiting.items() if count > 0}
        if any(not self._seconds[kind] for kind in waiting):
            return None
        return sum(count * sum(self._seconds[kind]) / len(self._seconds[kind]) for kind, count in waiting.items())
