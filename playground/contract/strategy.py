"""What a strategy is: kinds, knobs, slots, guarantees, and the registry that finds them. Read this first.

A strategy is a class in a file of its own under `strategies/`. Its annotated fields are its knobs, its docstring says what
it does, how in a few lines, and where it comes from. Giving it a `name` registers it; nothing else has to be edited.

    class TopP(Sampler):
        \"\"\"Keep the smallest set of tokens whose probabilities reach p. ... arXiv 1904.09751.\"\"\"

        name, title, paper, sheet = "top_p", "Top-p (nucleus)", "1904.09751", "sampling/sampling-baselines"
        p: float = knob(0.9, 0.0, 1.0, help="mass that is kept")

It knows nothing of pages, JSON, timing, devices or other lanes.
"""
from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_type_hints

from playground.errors import Refusal
from playground.events import Drawn, Event

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from playground.algorithms.kv_cache.slot_merging import Merge
    from playground.contract.token_tree import TokenTree
    from playground.decoding.cache_manager import Full, Held
    from playground.decoding.lane import Lane
    from playground.decoding.rows import Rows
    from playground.engine.kv_buffer import Packed
    from playground.events import Figure, Note
    from playground.trace import Trace

GUARANTEES = ("greedy_identical", "distribution_identical", "constraint_sound", "budget_respected", "collapses", "heuristic")
NEEDS = ("draft", "constraint", "context", "labels", "tests", "corpus", "trained", "hidden_states", "attention_scores", "experts")
STAGES = ("mix", "penalty", "temperature", "truncation")


def knob(default: Any, low: float | None = None, high: float | None = None, *, help: str, step: float | None = None,
         choices: tuple[str, ...] = (), multiline: bool = False, file: bool = False) -> Any:
    """A field a person may set: a slider where it has limits, a menu where it has choices, a box otherwise.

    `file` marks a text that the shell can also read from a file, given as `file=PATH`.
    """
    meta = {"low": low, "high": high, "step": step, "help": help, "choices": choices, "multiline": multiline, "file": file}
    return field(default=default, metadata=meta)


def slot(default: str) -> Any:
    """A field filled by another strategy of the annotated kind; `default` is that strategy's name."""
    return field(default=default, metadata={"slot": True})


@dataclass(frozen=True)
class Knob:
    """A knob as shells, pages and programs see it."""

    name: str
    type: type
    default: Any
    min: float | None
    max: float | None
    step: float | None
    help: str
    choices: tuple[str, ...]
    multiline: bool
    file: bool

    def read(self, value: Any) -> Any:
        """`value`, perhaps typed by a person, as this knob's type and within its limits; raises Refusal."""
        converted = self._convert(value)
        if self.choices and converted not in self.choices:
            raise Refusal(f"{self.name} must be one of {', '.join(self.choices)}, not {value!r}.", self.name)
        if isinstance(converted, (int, float)) and not self._within(converted):
            raise Refusal(f"{self.name} must lie between {self.min} and {self.max}, not {value}.", self.name)
        return converted

    def _convert(self, value: Any) -> Any:
        try:
            if self.type is bool and isinstance(value, str):
                return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]
            if self.type is int and isinstance(value, float) and not value.is_integer():
                raise ValueError
            return self.type(value)
        except (ValueError, KeyError, TypeError, OverflowError):
            kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
            raise Refusal(f"{self.name} must be {kinds[self.type]}, not {value!r}.", self.name) from None

    def _within(self, value: float) -> bool:
        return not math.isnan(value) and (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


class Strategy:
    """Base of every kind. Subclasses with a `name` are registered and become dataclasses over their knobs."""

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # arXiv number, or author and year
    sheet: ClassVar[str] = ""
    guarantee: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    reconstruction: ClassVar[bool] = False
    sure: ClassVar[str] = "high"  # how sure we are that this is what its source describes: high, medium or low
    runs_programs: ClassVar[bool] = False  # it runs what the model wrote, in the sandbox; a public page has to allow that
    translates: ClassVar[bool] = False  # its draft model may have tokens of its own
    remembers: ClassVar[bool] = False  # it learns from one run of a visitor for the next, through lm.memory

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(cls)
        if "name" in cls.__dict__:
            _register(cls)

    @classmethod
    def knobs(cls) -> list[Knob]:
        """The knobs, in the order they are written."""
        types = _types(cls)
        return [Knob(f.name, types[f.name], f.default, *_limits(f)) for f in fields(cls) if "help" in f.metadata]

    @classmethod
    def slots(cls) -> dict[str, str]:
        """Kind of strategy that fills each slot, by field name, {"drafter": "drafter"}."""
        types = _types(cls)
        return {f.name: types[f.name].kind for f in fields(cls) if f.metadata.get("slot")}

    @classmethod
    def summary(cls) -> str:
        """First paragraph of the docstring, on one line."""
        return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())

    @classmethod
    def family(cls) -> str:
        """Folder the strategy lives in."""
        parts = cls.__module__.split(".")
        return parts[1] if parts[0] == "strategies" and len(parts) > 2 else parts[0]

    def inner(self, depth: int, tied: bool) -> list[Inner]:
        """Early exits it reads beside the rows, of a model with `depth` layers, whose head is its embeddings where they are tied.

        A sampler finds them in what it mixes, anyone else in the `others` of the target's rows.
        """
        return []

    @property
    def reads_hidden(self) -> tuple[str, ...]:
        """Streams whose rows bring along what their heads read."""
        return ("target",) if "hidden_states" in self.needs else ()

    @property
    def trained(self) -> str:
        """What else one may choose where the weights are missing that it finds in `lm.fitted`, by its name; empty where it looks for none."""
        return ""

    def values(self) -> dict[str, Any]:
        """Current value of every knob."""
        return {k.name: getattr(self, k.name) for k in self.knobs()}

    def check(self) -> None:
        """Raise Refusal where knobs contradict each other; each by itself lies within its limits already."""


@cache
def _types(cls: type) -> dict[str, Any]:
    """Types of a class's fields. Evaluating annotations takes a tenth of a millisecond a class, and every run asks many times."""
    return get_type_hints(cls)


class Decoder(Strategy):
    """Answers: how does the text grow?"""

    kind = "decoder"
    refuses: ClassVar[tuple[str, ...]] = ()  # kinds or names of toggles that cannot work with it; "drawing": samplers that draw by chance
    several: ClassVar[bool] = False  # sequences grow side by side
    whole_answers: ClassVar[bool] = False  # it chooses among whole answers, so a text may be shorter than was asked though nothing ended it
    owns_constraint: ClassVar[bool] = False  # rows come unmasked, with rows.masks to look at; the decoder keeps the text legal and ends it
    views: ClassVar[tuple[str, ...]] = ()  # streams of the target's model over the prompt with another passage, which `passages` gives

    def decode(self, lm: Lane) -> Iterator:
        """Yield events and requests; `lm` ends the generator when the text is complete."""
        raise NotImplementedError

    def toggles(self) -> list[Strategy]:
        """Toggles the decoder brings along, under those a person adds."""
        return []

    def passages(self, passage: str, question: str) -> dict[str, str]:
        """For each of its views the passage that stands in the place of the prompt's own; empty for none."""
        return {}


class CanvasDecoder(Decoder):
    """Answers: which masked positions are filled next? What goes by text that grows from left to right has no place beside it."""

    kind = "canvas_decoder"
    refuses = ("sampler", "constraint", "cache_policy", "compute_policy")


class Preset(Decoder):
    """A named combination: a paper's system."""

    kind = "preset"


class Inner(NamedTuple):
    """A stream left after `layer` of its layers, 0 for the embeddings: the head reads what comes out there, after the final norm or as it is."""

    stream: str
    layer: int
    norm: bool = True


class Sampler(Strategy):
    """Answers: which token, given the rows? Samplers of a lane act in the order of STAGES, then of their ranks, then of their being added.

    Those of the stage "mix" write `mix`, all others `apply`. One that remembers, or has something to show, writes
    `observe`; what it remembers moves only there, so guesses that are refused leave no trace. What is to be shown of a
    history goes into `explain`.
    """

    kind = "sampler"
    stage: ClassVar[str] = "truncation"
    rank: ClassVar[int] = 50  # place within the stage: below 50 those whose order is settled by the transformers library
    draws: ClassVar[bool] = True  # False where the sampler reshapes scores and leaves the choice to argmax
    row_wise: ClassVar[bool] = True  # False where a row's scores depend on how earlier tokens were chosen
    streams: ClassVar[tuple[str, ...]] = ()  # others it reads: "without_context" is the target over the prompt alone, `instructions` name more
    start: ClassVar[int] = 0  # tokens of the prompt, once the lane has begun
    piece: ClassVar[Callable[[int], str]] = str  # what a token reads

    def begin(self, start: int, piece: Callable[[int], str]) -> None:
        """Hear of the lane before its first row: how many tokens the prompt has, and what a token reads."""
        self.start, self.piece = start, piece

    def instructions(self) -> dict[str, str]:
        """Streams of the target's model over the same prompt with an instruction before it: the instructions, by name of the stream."""
        return {}

    def prepare(self, lm: Lane) -> Iterator:
        """Yield events and requests before the prompt is read, such as those of `lm.reading`."""
        yield from ()

    def apply(self, scores: torch.Tensor, histories: list[list[int]]) -> torch.Tensor:
        """New scores for rows of scores [n, V]; -inf removes a token. `histories` are the tokens before each row, prompt included."""
        raise NotImplementedError

    def mix(self, rows: dict[str | Inner, torch.Tensor]) -> torch.Tensor:
        """Scores [n, V] made of raw rows [n, V] by stream: "target", each of `streams`, each of `inner`.

        Where it needs hidden states, "hidden" are those of the target, [n, width], as its head reads them.
        """
        raise NotImplementedError

    def observe(self, rows: dict[str | Inner, torch.Tensor], token: int, position: int) -> Iterator[Event]:
        """Learn that `token` was kept at a position, 0 for the first generated one, and yield what is to be shown.

        `rows` are the scores [V] this sampler was given there, by stream; one that mixes sees each of its streams.
        """
        yield from ()

    def explain(self, scores: torch.Tensor, history: list[int], token: int) -> Iterator[Event]:
        """What is to be shown of a token that was kept after a history, prompt included; `scores` [V] are what this sampler was given there."""
        yield from ()

    @property
    def observes(self) -> bool:
        return type(self).observe is not Sampler.observe

    @property
    def explains(self) -> bool:
        return type(self).explain is not Sampler.explain


class Drafter(Strategy):
    """Answers: what do we guess ahead?"""

    kind = "drafter"
    drawn: ClassVar[Drawn] = "deterministic"

    def propose(self, lm: Lane, budget: int) -> Iterator:
        """Return a TokenTree at most `budget` deep, after yielding whatever requests it takes."""
        raise NotImplementedError

    def observe(self, tree: TokenTree, rows: Rows, verdict: Event) -> None:
        """Learn from what the target said; called after the kept tokens are committed."""


class Verifier(Strategy):
    """Answers: which guesses stand?"""

    kind = "verifier"
    exact_for: ClassVar[tuple[Drawn, ...]] = ()
    greedy_only: ClassVar[bool] = False  # exact only where nothing is drawn by chance

    def judge(self, lm: Lane, tree: TokenTree, rows: Rows) -> Event:
        """The Verdict on a tree whose nodes, and whose root, have a row of the target each."""
        raise NotImplementedError


class Constraint(Strategy):
    """Answers: which tokens are legal now? Declares a grammar; the lane keeps its state in step with the text."""

    kind = "constraint"

    def grammar(self) -> tuple[str, str]:
        """Kind and source of the grammar: json_schema, regex, lark, gbnf or choice."""
        raise NotImplementedError

    def begin(self, start: int, spelling: Callable[[int], bytes]) -> None:
        """Hear of the lane before its first row: how many tokens the prompt has, and the bytes a token adds to a text."""

    def narrow(self, masks: torch.Tensor, histories: Sequence[list[int]]) -> torch.Tensor:
        """Of the tokens the grammar allows, [n, V], those that stay; `histories` are the tokens before each row, prompt included."""
        return masks

    def explain(self, history: list[int], token: int) -> Iterator[Event]:
        """What is to be shown of a token that was kept after a history, prompt included."""
        yield from ()

    @property
    def narrows(self) -> bool:
        return type(self).narrow is not Constraint.narrow

    @property
    def explains(self) -> bool:
        return type(self).explain is not Constraint.explain


class CachePolicy(Strategy):
    """Answers: what stays in the KV cache, and how? It acts after the prompt and after every keep, on what was kept.

    A row-wise one writes `visible`: a mask, and slots that no later row may see are freed. One that goes by attention sets
    `watches` and hears in `attended` what kept rows attended to; one that packs sets `packs` and writes `due` and `encode`;
    one that lets rows choose for themselves sets `focuses` and writes `focus`; one that goes by what the prompt looks for sets
    `asks` and hears its queries in `asked`; one under which what is freed leaves something
    behind in what stays sets `merges` and writes `merge`; one that lets the later layers read a part of the prompt alone writes
    `cuts` and `onward`. What it frees or packs is gone for good.
    """

    kind = "cache_policy"
    row_wise: ClassVar[bool] = True  # False where what a row sees depends on the path, not on its position alone
    watches: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    focuses: ClassVar[bool] = False  # rows see what `focus` chooses for them by their own attention
    asks: ClassVar[bool] = False

    def visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which true positions key [m] each query position [n, 1] may attend to, [n, m]; depends on positions alone."""
        raise NotImplementedError

    def wants(self, position: int, prompt: int) -> bool:
        """Whether it wants to hear what the row at a position attended to; `prompt` is the number of tokens of the prompt."""
        return True

    def attended(self, layer: int, weights: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Hear of rows that were kept: attention weights [kv_heads, n, m], summed over the query heads of a group, of the rows at
        positions [n] over the slots at positions [1 or kv_heads, m]; where that is below 0 a slot is empty and has no weight."""

    def chooses(self, position: int, prompt: int) -> bool:
        """Whether `focus` is asked what the row at a position sees; any other row sees everything."""
        return position >= prompt

    def focus(self, layer: int, weights: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """What the rows at positions [n] see, [kv_heads, n, m], of what they would attend to: weights [kv_heads, n, m], summed over the
        query heads of a group."""
        raise NotImplementedError

    def asked(self, layer: int, queries: torch.Tensor) -> None:
        """Hear of the next rows of the prompt what they look for: queries as they meet the keys, [kv_heads, group, n, d]."""

    def cuts(self, layers: int) -> list[int]:
        """Which of a model's layers, ascending and never the first, read no more of the prompt than `onward` chooses of what the layer before them read."""
        return []

    def onward(self, held: Held) -> torch.Tensor:
        """Which tokens of the prompt go on, [1, slots], by the layer before a cut, which holds what it read; the prompt's last one does in any case."""
        raise NotImplementedError

    @property
    def renumbers(self) -> bool:
        """Whether rows stand at their place in the cache, not at that in the text; then it writes `far` and `skipped`."""
        return False

    def far(self, key: torch.Tensor) -> torch.Tensor:
        """Which true positions key [..., m] lie before the gap that rows of the text leave open."""
        raise NotImplementedError

    def skipped(self, query: torch.Tensor) -> torch.Tensor:
        """How many positions wide the gap is for rows at positions [n], [n]."""
        raise NotImplementedError

    def retain(self, held: Held) -> torch.Tensor:
        """Which slots of one layer stay, [1 or kv_heads, slots]; of a row-wise policy, those its next row may see."""
        raise NotImplementedError

    def retain_all(self, held: Sequence[Held]) -> list[torch.Tensor]:
        """The same for each layer; for a policy to which one look at all of them is cheaper than many."""
        return [self.retain(layer) for layer in held]

    def merge(self, held: Held, stays: torch.Tensor, goes: torch.Tensor) -> Merge | None:
        """Which of the slots `goes` [kv_heads, slots] are added to which of those that `stays` before they are freed, and how; asked where some go.

        None where none are.
        """
        raise NotImplementedError

    def budget(self, generated: int) -> int:
        """Most slots a layer and KV head may hold after a keep, with that many tokens generated."""
        raise NotImplementedError

    @classmethod
    def holding(cls, tokens: int, prompt: int) -> dict[str, Any] | None:
        """Knobs with which a layer and KV head holds so many tokens of a prompt, on average and as nearly as they allow.

        None where the policy does not go by a number of tokens. Comparisons at equal room ask for them.
        """
        return None

    def promise(self, full: Full) -> float:
        """Share of a full cache's bytes that it means to hold: by its budget where it keeps to one, by the bits of packed numbers where it packs."""
        if self.packs:
            return sum(self._packed_share(part, full) for part in ("keys", "values")) / 2
        return min(1.0, self.budget(full.generated) / full.length) if "budget_respected" in self.guarantee else 1.0

    def _packed_share(self, part: str, full: Full) -> float:
        packed = self.due(part, full.length) / full.length
        return 1 - packed + packed * self.packed_bits(part, full) / full.bits

    def packed_bits(self, part: str, full: Full) -> float:
        """Bits that a packed number of the "keys" or "values" takes, its part of scales and of all else that is held beside it included."""
        raise NotImplementedError

    def rehearsal(self, text: list[int]) -> list[int]:
        """Tokens to be read behind the prompt and forgotten at once: `attended` hears of their rows, and nobody else does."""
        return []

    def explain(self, prompt: int, layers: int) -> Iterator[Event]:
        """What is to be shown of what was kept since it was last asked, besides what the cache holds; the prompt has so many tokens, the model layers."""
        yield from ()

    def due(self, part: str, exact: int) -> int:
        """How many of the oldest rows of the "keys" or "values" are to be packed, where `exact` are held as they were written."""
        return 0

    def encode(self, part: str, rows: torch.Tensor, packed: Packed | None) -> Packed:
        """Rows [kv_heads, n, d] in a coarser form, together with those that were packed before them."""
        raise NotImplementedError


class ComputePolicy(Strategy):
    """Answers: which layers, neurons or experts run?"""

    kind = "compute_policy"


class Variant(Strategy):
    """A command that makes a new entry in the model catalogue."""

    kind = "variant"
    adjective: ClassVar[str] = ""  # what the model becomes: the entry is titled "Pocket, hyperfitted"

    def make(self, network: PreTrainedModel, texts: list[list[int]], seed: int) -> Iterator[Figure | Note]:
        """Change a network of the library, its weights in float32, in place; done where the generator ends.

        `texts` are token ids. Yields what was measured on the way; the same seed gives the same weights. Raises Refusal.
        """
        raise NotImplementedError


class Study(Strategy):
    """A function of traces with a figure."""

    kind = "study"

    def draw(self, traces: list[Trace]) -> list[Figure | Note]:
        """Figures made of finished lanes, a trace of one lane each, and what there is to say about them; raises Refusal."""
        raise NotImplementedError


KINDS = ("decoder", "canvas_decoder", "preset", "sampler", "drafter", "verifier", "constraint", "cache_policy",
         "compute_policy", "variant", "study")
_registered: dict[str, type[Strategy]] = {}  # written while strategy modules are imported, read-only after


def _register(cls: type[Strategy]) -> None:
    taken = _registered.get(cls.name)
    if taken and taken.__module__ != cls.__module__:
        raise TypeError(f"strategy name {cls.name!r} is taken by {taken.__module__}")
    unknown = [g for g in cls.guarantee if g not in GUARANTEES] + [n for n in cls.needs if n not in NEEDS]
    if unknown:
        raise TypeError(f"{cls.__name__} declares {unknown[0]!r}; guarantees are {GUARANTEES}, needs are {NEEDS}")
    _registered[cls.name] = cls


def discover() -> dict[str, type[Strategy]]:
    """Every strategy by name."""
    _import_all()
    return dict(sorted(_registered.items()))


@cache
def _import_all() -> None:
    """Importing all modules under `strategies` is what registers them; once is enough."""
    package = importlib.import_module("strategies")
    for module in pkgutil.walk_packages(package.__path__, "strategies."):
        importlib.import_module(module.name)


def find(name: str) -> type[Strategy]:
    """The strategy of that name; raises Refusal with the nearest names."""
    _import_all()
    if name not in _registered:
        near = get_close_matches(name, discover(), 3)
        hint = f" Did you mean {' or '.join(near)}?" if near else " `python -m playground list` shows them all."
        raise Refusal(f"There is no strategy named {name!r}.{hint}", name)
    return _registered[name]


def make(name: str, /, **settings: Any) -> Strategy:
    """A strategy with its knobs set; slots take a strategy or its name, their default otherwise. Raises Refusal for what is wrong."""
    cls = find(name)
    knobs = {k.name: k for k in cls.knobs()}
    for given in settings:
        if given not in knobs and given not in cls.slots():
            near = get_close_matches(given, knobs, 1)
            known = f"its knobs are {', '.join(knobs)}" if knobs else "it has none"
            raise Refusal(f"{name} has no knob {given!r}; {f'did you mean {near[0]}?' if near else known + '.'}", given)
    filled = {slot: _fill(slot, kind, settings.get(slot, _default(cls, slot))) for slot, kind in cls.slots().items()}
    made = cls(**filled, **{k: knobs[k].read(v) for k, v in settings.items() if k in knobs})
    made.check()
    return made


def _fill(slot_name: str, kind: str, filling: Any) -> Strategy:
    filled = filling if isinstance(filling, Strategy) else make(str(filling))
    if filled.kind != kind:
        raise Refusal(f"{slot_name} takes a {kind}, and {filled.name} is a {filled.kind.replace('_', ' ')}.", slot_name)
    return filled


def _default(cls: type[Strategy], field_name: str) -> str:
    return next(f.default for f in fields(cls) if f.name == field_name)


def _limits(f: Field) -> tuple:
    return tuple(f.metadata[key] for key in ("low", "high", "step", "help", "choices", "multiline", "file"))
