"""The base class of every strategy, and the table that registers its subclasses."""
from __future__ import annotations

import inspect
from dataclasses import Field, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from playground.contract.knobs import Knob, knob, slot

if TYPE_CHECKING:
    from playground.contract.early_exit import EarlyExit

GUARANTEES = (
    "greedy_identical",
    "distribution_identical",
    "constraint_sound",
    "budget_respected",
    "collapses",
    "reads_only",
    "heuristic",
)
NEEDS = (
    "draft",
    "constraint",
    "context",
    "labels",
    "tests",
    "corpus",
    "trained",
    "hidden_states",
    "attention_scores",
    "experts",
    "state_space",
    "encoder",
)
REGISTERED: dict[str, type[Strategy]] = {}  # written while strategy modules are imported, read-only afterwards


@dataclass_transform(field_specifiers=(knob, slot, field))
class Strategy:
    """Base of every kind. A subclass with a `name` is registered and becomes a dataclass over its knobs."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every subclass is a dataclass

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # arXiv number, or author and year
    new_in: ClassVar[str] = ""  # year in which engines took it up, if that is recent; the library groups these
    sheet: ClassVar[str] = ""
    guarantee: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    reconstruction: ClassVar[bool] = False
    sure: ClassVar[str] = "high"  # confidence that this is what its source describes: high, medium or low
    # executes model-written programs in the sandbox; a public page has to allow it
    runs_programs: ClassVar[bool] = False
    drafts_at_will: ClassVar[bool] = False  # goes on without the draft model once that can read no more
    translates: ClassVar[bool] = False  # its draft model may have another tokenizer
    exits_early: ClassVar[bool] = False  # runs some layers of the target alone, with lm.exit or lm.target.resume
    reads_keys: ClassVar[bool] = False  # reads key and value states of the target, with lm.target.last_cache
    fitted_to_target: ClassVar[bool] = False  # its trained weights belong to the target, whatever the draft model
    # what `calibrate` reads of the small world if it is given no texts; no tasks stand for all of them
    calibration_tasks: ClassVar[tuple[str, ...]] = ()
    questions_per_task: ClassVar[int] = 8
    calibrates_on_tales: ClassVar[bool] = False  # in place of the small world, it reads the bundled tales
    weights_of: ClassVar[str] = ""  # the strategy whose trained weights it uses, if not its own
    remembers: ClassVar[bool] = False  # learns from one run of a visitor for the next, through lm.memory

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(cls)
        if "name" in cls.__dict__:
            _register(cls)

    @classmethod
    def knobs(cls) -> list[Knob]:
        """The knobs, in the order of declaration."""
        return list(_knobs(cls))  # type: ignore[arg-type]  # a class is hashable; mypy looks at its objects

    @classmethod
    def slots(cls) -> dict[str, str]:
        """Kind of strategy that fills each slot, by field name, for example {"drafter": "drafter"}."""
        return dict(_slots(cls))  # type: ignore[arg-type]

    @classmethod
    def summary(cls) -> str:
        """First paragraph of the docstring, on one line."""
        return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())

    @classmethod
    def family(cls) -> str:
        """Folder that the strategy's file is in."""
        parts = cls.__module__.split(".")
        return parts[1] if parts[0] == "strategies" and len(parts) > 2 else parts[0]

    def inner(self, depth: int, tied: bool) -> list[EarlyExit]:
        """Early exits this strategy reads besides the logits, for a model with `depth` layers.

        `tied` says whether the lm_head shares its weights with the embeddings. A sampler gets the exits in `mix`,
        every other kind in `rows.others` of the target.
        """
        return []

    def state_layers(self, depth: int) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads for every committed token, in `lm.target.states`.

        `depth` is the number of the target's layers, and as a layer the input of the lm_head. Needs no forward.
        """
        return ()

    @property
    def reads_hidden(self) -> tuple[str, ...]:
        """Streams whose rows carry `rows.hidden`, the input of the lm_head."""
        return ("target",) if "hidden_states" in self.needs else ()

    @property
    def trained(self) -> str:
        """What to choose instead if the weights it looks up in `lm.fitted` are missing; empty if it needs none."""
        return ""

    @property
    def prefers_trained(self) -> bool:
        """Whether it uses weights in `lm.fitted` if there are some, and runs without them.

        The lane then sets `found_trained` before the run.
        """
        return False

    def check_target(self, model: Any) -> None:
        """Raise Refusal if it cannot work with this target, an `engine.model.Model`; called before the run."""

    def begin_fitted(self, weights: dict[str, Any]) -> None:
        """Learn from its trained weights, by name, what the lane asks before the run."""

    found_trained = False  # whether weights fitted to the models of this lane were found

    def values(self) -> dict[str, Any]:
        """Current value of every knob."""
        return {k.name: getattr(self, k.name) for k in self.knobs()}

    def check(self) -> None:
        """Raise Refusal if knobs contradict each other. Each is already within its own limits."""


def _types(cls: type) -> dict[str, Any]:
    """Types of a class's fields, its bases' first."""
    return {name: kind for base in reversed(cls.__mro__) for name, kind in _own_types(base).items()}


@cache
def _own_types(cls: type) -> dict[str, Any]:
    """What a class itself annotates. Cached: its annotations are evaluated once for all strategies derived from it."""
    return inspect.get_annotations(cls, eval_str=True)


@cache
def _slots(cls: type) -> tuple[tuple[str, str], ...]:
    """Name and kind of each slot of a class. Cached: assembling a lane reads those of all its strategies."""
    types = _types(cls)
    return tuple((f.name, types[f.name].kind) for f in fields(cls) if f.metadata.get("slot"))


@cache
def _knobs(cls: type) -> tuple[Knob, ...]:
    """The knobs of a class. Cached: assembling a lane reads those of all its strategies."""
    types = _types(cls)
    return tuple(Knob.of(f, types[f.name]) for f in fields(cls) if "help" in f.metadata)


def _register(cls: type[Strategy]) -> None:
    taken = REGISTERED.get(cls.name)
    if taken and taken.__module__ != cls.__module__:
        raise TypeError(f"strategy name {cls.name!r} is taken by {taken.__module__}")
    unknown = [g for g in cls.guarantee if g not in GUARANTEES] + [n for n in cls.needs if n not in NEEDS]
    if unknown:
        raise TypeError(f"{cls.__name__} declares {unknown[0]!r}; guarantees are {GUARANTEES}, needs are {NEEDS}")
    for hidden in _hiding(cls):
        raise TypeError(f"{cls.__name__}: rename its knob {hidden!r}, which hides that attribute of its base class")
    REGISTERED[cls.name] = cls


def _hiding(cls: type[Strategy]) -> list[str]:
    """Knobs and slots with the name of something else that a base class has, such as `values` or `check`."""
    return [f.name for f in fields(cls) if any(
        f.name in vars(base) and f.name not in getattr(base, "__dataclass_fields__", {}) for base in cls.__mro__[1:]
    )]
