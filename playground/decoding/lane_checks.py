"""Whether lanes can be started: checked while they are edited, and again before a run.

What is known without loading a model is checked here: knobs and combinations, constraints, and what a strategy needs
besides, a context or a draft model. A check is cancelled by a newer one of the same editor.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from threading import Lock
from typing import Any

from playground.confined.child import Cancelled, ConfinedTask
from playground.contract import Constraint
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble, check_context, check_draft
from playground.contract.model_fit import check_model
from playground.contract.weight_change import check_changes
from playground.errors import Refusal
from playground.grammar.client import check_constraint


@dataclass(frozen=True)
class Surroundings:
    """What lanes need besides their own settings: a passage, whether there is a draft model, and the model's name with
    its attention: empty if it continues text, None if that is not known yet; and whether that is the playground's own.
    """

    context: str = ""
    drafted: bool = True
    model: str = "The model"
    attention: str | None = None
    attends: bool = True  # also if it is not known yet


@dataclass
class LaneCheck:
    """What a lane guarantees and what is to know about its constraint; or why it cannot be started, and which knob,
    part or control the problem is about.
    """

    guarantee: list[str]
    problem: str = ""
    about: str = ""
    remarks: list[str] = field(default_factory=list)


class NewestChecks:
    """The checks under way, one for each editor: a newer one cancels the one before."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._checks: dict[str, ConfinedTask] = {}

    @contextmanager
    def of(self, editor: str) -> Iterator[ConfinedTask]:
        check = ConfinedTask()
        with self._lock:
            older, self._checks[editor] = self._checks.get(editor), check
        if older:
            older.cancel()
        try:
            yield check
        finally:
            with self._lock:
                if self._checks.get(editor) is check:
                    del self._checks[editor]


@cache
def newest_checks() -> NewestChecks:
    """The checks of this process."""
    return NewestChecks()


def judge(lanes: list[LaneConfig], around: Surroundings | None = None, editor: str = "") -> list[dict[str, Any]]:
    """The verdict on each lane, as plain data; none if a newer check of the same editor has replaced this one.

    Without `around`, what lanes need besides their own settings is not checked.
    """
    with newest_checks().of(editor) if editor else nullcontext(ConfinedTask()) as check:
        try:
            return [asdict(_verdict(lane, around, check)) for lane in lanes]
        except Cancelled:
            return []


def check_ready(lanes: list[LaneConfig], around: Surroundings) -> None:
    """Raise Refusal for the first lane that cannot be started; `about` is "lane", its index, and the field, with colons
    between.
    """
    for index, verdict in enumerate(_verdict(lane, around, ConfinedTask()) for lane in lanes):
        if verdict.problem:
            raise Refusal(f"Lane {index + 1} cannot start. {verdict.problem}", f"lane:{index}:{verdict.about}")


def check_some_ready(lanes: list[LaneConfig], around: Surroundings) -> None:
    """Raise Refusal, as `check_ready` does, if no lane can be started. One of several that cannot fails by itself: its
    sentence takes the place of its text, and the others run.
    """
    if all(_verdict(lane, around, ConfinedTask()).problem for lane in lanes):
        check_ready(lanes, around)


def remarks(lanes: list[LaneConfig]) -> list[str]:
    """What is to know about the constraints of lanes that can be started, in sentences, each once."""
    return list(dict.fromkeys(remark for lane in lanes for remark in _remarks(lane)))


def _remarks(lane: LaneConfig) -> list[str]:
    try:
        constraint = assemble(lane).constraint
    except Refusal:  # the run says why
        return []
    return constraint.remarks() if constraint else []


def _verdict(lane: LaneConfig, around: Surroundings | None, check: ConfinedTask) -> LaneCheck:
    try:
        assembly = assemble(lane)
        check_changes(lane.weights)
        if around:
            assembly.attends = around.attends
            check_context(assembly, around.context)
            check_models(assembly, around)
        _check_constraint(assembly, check)
    except Refusal as refusal:
        return LaneCheck([], str(refusal), refusal.about)
    remarks = assembly.constraint.remarks() if assembly.constraint else []
    return LaneCheck(assembly.claims(), remarks=remarks)


def check_models(assembly: Assembly, around: Surroundings) -> None:
    """Raise Refusal if the models cannot run a lane, as far as that is known before they are loaded."""
    check_draft(assembly, around.drafted)
    if around.attention is not None:
        check_model(assembly.decoder, around.model, around.attention)


def _check_constraint(assembly: Assembly, check: ConfinedTask) -> None:
    """Raise Refusal, about the knob that holds its text, for a constraint that cannot be used."""
    constraint = assembly.constraint
    if constraint is None or type(constraint).grammar is Constraint.grammar:
        return
    try:
        check_constraint(*constraint.grammar(), check)
        constraint.check_source()
    except Refusal as refusal:
        raise Refusal(str(refusal), refusal.about or _text_knob(constraint)) from None


def _text_knob(constraint: Constraint) -> str:
    """The knob with the text of a grammar; the name of the constraint if it has none."""
    return next((knob.name for knob in constraint.knobs() if knob.type is str and not knob.choices), constraint.name)
