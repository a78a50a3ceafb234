"""The canvas: one strategy's run over positions that are filled in any order. Canvas decoders receive it as `lm`.

    rows = yield lm.read()                             one forward: a row for every position of the answer
    rows = yield lm.read(wanted, computed, states)     the same for some positions; the others as they were before
    token = lm.pick(rows, position)                    choose a token: sampled if a sampler draws, argmax otherwise
    yield lm.fill(positions, tokens, confidences)      fill these positions, which is final

It takes the place of Lane and has the same interface towards the session. The text is committed when no position is
masked, up to its first end token or stop string.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Positions
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.contract.lane_config import attention_of, check_model
from playground.contract.token_tree import TokenTree
from playground.decoding import fitted_weights as fitted
from playground.decoding.recorder import CommittedToken, Recorder
from playground.decoding.requests import Feed, Immediate, Request, Steps
from playground.decoding.rng import Draws
from playground.decoding.rows import Rows
from playground.decoding.sampler_chain import Chain
from playground.decoding.sequence import Bounds, Sequence
from playground.engine.canvas.canvas_pass import CanvasPass
from playground.engine.sampling import entropy
from playground.engine.text.tokens import Reader
from playground.errors import Refusal
from playground.events import Event, Fill, Forward, Note, Reason, rounded

if TYPE_CHECKING:
    from playground.contract import Constraint, Decoder
    from playground.contract.lane_config import Assembly
    from playground.decoding.limits import Limits
    from playground.engine.canvas.denoiser import CanvasStates, MaskedDenoiser
    from playground.engine.canvas.table_denoiser import OracleDenoiser
    from playground.engine.model import Model
    from playground.grammar.matcher import Matcher


def check_fit(decoder: Decoder, model: Model | MaskedDenoiser | OracleDenoiser) -> None:
    """Raise Refusal if the decoder fills masked positions and the model continues text, or vice versa, or if it cannot
    run with the model's attention.
    """
    check_model(decoder, model.name, attention_of(model))


@dataclass(frozen=True)
class Reading:
    """What a forward over a canvas reads; positions are counted from 0 at the end of the prompt, the prompt's are
    negative.

    wanted: positions to predict; computed: positions that pass through the layers, the others keep their `states`; None
    is all. supposed: tokens read in place of masks, which are not filled. unprompted: the prompt is masked.
    """

    wanted: Positions[int] | None = None
    computed: Positions[int] | None = None
    states: CanvasStates | None = None
    supposed: Mapping[int, int] = field(default_factory=dict)
    unprompted: bool = False


class CanvasFeed(Feed):
    """The share of one canvas in a forward. Canvases of one model can share a forward."""

    stream: Canvas
    work: CanvasPass

    @property
    def rows(self) -> int:
        return len(self.work.entering)

    def describe(self) -> Forward:
        """The event for this forward, which has run. A layer may have computed more than entered the first."""
        model, size = self.stream.model, len(self.work.canvas)
        flops = model.flops(self.rows, size - self.rows, model.depth)
        if self.work.computed_by_layer:
            flops = sum(model.flops(rows, size - rows, 1) for rows in self.work.computed_by_layer)
        return Forward(tokens=self.rows, context=size - self.rows, layers=model.depth, flops=flops)


class Canvas:
    """The answer of one lane, filled position by position."""

    name, captures = "target", frozenset()  # as a source of forwards

    def __init__(
        self,
        prompt: list[int],
        models: dict[str, OracleDenoiser | MaskedDenoiser],
        assembly: Assembly,
        limits: Limits,
        recorder: Recorder,
    ):
        _check(limits)
        self.model = self.target_model = models["target"]
        self.recorder = recorder
        self.fitted = fitted.find_all(assembly.strategies(), models)  # fitted weights by name, by strategy
        self.length = self.model.answer_length(prompt, limits.max_new_tokens)  # positions to fill
        self.ids: list[int | None] = [None] * self.length  # None is masked
        self.draws = Draws(limits.seed)
        self.reason: Reason | None = None
        self.events: list[Event] = []  # not yet delivered
        bounds = Bounds.of(len(prompt) + limits.max_new_tokens, self.model, limits.stop)
        chain = Chain(assembly.samplers, None, self.model.end_ids)
        # the prompt; the answer is appended once it is complete
        self.sequence = Sequence(0, prompt, bounds, chain, Reader(self.model.tokens, prompt))
        self._constraint, self._matcher = assembly.constraint, self._new_matcher(assembly.constraint)
        self._last_rows: Rows | None = None
        self._logits_at_fill: dict[int, Tensor] = {}  # by filled position, its logits [V] in the forward before
        self._masks_at_fill: dict[int, Tensor] = {}  # by filled position, its token mask, bool [V]
        self._last_fill: Immediate | None = None  # the last request to fill

    def _new_matcher(self, constraint: Constraint | None) -> Matcher | None:
        """Follows the text from left to right. Raises Refusal for what has no grammar, or no engine for one."""
        if constraint is None:
            return None
        if not hasattr(self.model, "grammars"):
            raise Refusal(f"{self.model.name} is a table and takes no constraint: remove {constraint.title}.", "model")
        if constraint.checker():
            raise Refusal(
                f"{constraint.title} checks texts by a program and has no grammar that a canvas can follow: remove it.",
                constraint.name,
            )
        self.model.tokens.check_constrainable(self.prompt)
        constraint.begin(self.sequence.start, self.model.tokens.bytes)
        return self.model.grammars.compile(*constraint.grammar()).matcher()

    # --- what a strategy reads ---

    @property
    def tokens(self) -> list[int]:
        """The prompt, and the answer once it is complete."""
        return self.sequence.tokens

    @property
    def prompt(self) -> list[int]:
        return self.sequence.tokens[:self.sequence.start]

    @property
    def text(self) -> str:
        return self.sequence.text

    @property
    def masked(self) -> list[int]:
        """Masked positions, ascending, counted from 0 at the end of the prompt."""
        return [position for position, token in enumerate(self.ids) if token is None]

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self.model.end_ids

    def piece(self, token: int) -> str:
        """The text that is displayed for a token."""
        return self.model.tokens.piece(token)

    def spell(self, text: str) -> list[int]:
        """A text as token ids, without special tokens."""
        return self.model.tokens.encode_continuation(text)

    # --- requests ---

    def read(self, *given, **named) -> Request:
        """Request a forward over the canvas. Answers with Rows whose node j is position j: logits [G, V], NaN for
        positions that are not wanted. Arguments as of `Reading`.

        A table always predicts and computes everything. Raises ValueError if a wanted position is predicted by one that
        is not computed.
        """
        reading = Reading(*given, **named)
        return Request(self._read(reading))

    def cache_bytes(self) -> int:
        """Not counted: a canvas has states of its own positions at most, whose number is limited before the run."""
        return 0

    def new_states(self) -> CanvasStates | None:
        """Empty key and value states of this canvas. Raises Refusal for a table, which has none."""
        if not hasattr(self.model, "new_states"):
            raise Refusal(
                f"{self.model.name} is a table without key and value states, so there is nothing to cache: choose a "
                "neural denoiser such as pocket-diffusion.",
                "model",
            )
        return self.model.new_states(self.sequence.start + self.length)

    @property
    def everything(self) -> range:
        """All positions: those of the prompt, which are negative, and those of the answer."""
        return range(-self.sequence.start, self.length)

    @property
    def block_length(self) -> int:
        """Length of the blocks within which the model sees in both directions; 0 if it sees the whole canvas."""
        return getattr(self.model, "block_length", 0)

    def attend_in_blocks(self, length: int) -> None:
        """Change the length of the blocks for later forwards. Nothing changes on a model without blocks."""
        if self.block_length:
            self.model = self.model.in_blocks(length)

    def block_of(self, position: int) -> range:
        """The block of the model around a position, as far as it is on the canvas or in the prompt."""
        start = position - (self.sequence.start + position) % self.block_length
        return range(start, min(start + self.block_length, self.length))

    def blocks(self, length: int, start: int = 0) -> Iterator[range]:
        """Blocks of `length` positions from `start` on, in order; the model's blocks end them too."""
        while start < self.length:
            stop = min(start + length, self.length)
            if self.block_length:
                stop = min(stop, self.block_of(start).stop)
            yield range(start, stop)
            start = stop

    def sources(self, positions: Iterable[int]) -> list[int]:
        """The positions whose states predict the given ones, which have to be computed for them."""
        return [position - getattr(self.model, "shifted", False) for position in positions]

    def rows_of(self, raw: Tensor) -> Rows:
        """Rows with these logits [G, V], which a decoder computed from those of forwards."""
        return self._rows(raw, self._masks(raw))

    def based_on(self, rows: Rows | None) -> None:
        """Record that the next fill follows from these rows, not from the last forward over the canvas; from none if
        its tokens are fixed.
        """
        self._last_rows = rows

    def fill(self, positions: Iterable[int], tokens: Iterable[int], confidences: Iterable[float]) -> Request:
        """Request to fill masked positions; `confidences` are probabilities to display.

        Raises ValueError for a position that is not masked, or is listed twice.
        """
        if self._last_fill and not self._last_fill.served:
            raise RuntimeError("a fill was requested but not yielded: write `yield lm.fill(…)`")
        self._last_fill = Immediate(lambda: self._fill(list(positions), list(tokens), list(confidences)))
        return self._last_fill

    # --- random numbers ---

    def pick(self, rows: Rows, position: int, purpose: str = "token") -> int:
        """Choose a token for a position: sampled if a sampler draws, argmax otherwise."""
        if not rows.chain.draws:
            return rows.best(position)
        return self.draw(rows.p[rows.row(position)], position, purpose)

    def draw(self, p: Tensor, position: int, purpose: str) -> int:
        """Sample an index from a distribution p [n] for a position of the canvas."""
        return self.draws.pick(p, purpose, self.sequence.start + position)

    def flip(self, probability: float, position: int, purpose: str) -> tuple[bool, float]:
        """True with the given probability, and the uniform number that decided."""
        return self.draws.flip(probability, purpose, self.sequence.start + position)

    # --- the interface of a lane towards the session ---

    def record(self, event: Event) -> None:
        """Record an event."""
        self.events.append(event)

    def begin(self) -> None:
        """Before the first forward: say what is to know about the grammar; a canvas commits nothing yet."""
        if self._constraint:
            self.events += map(Note, self._constraint.remarks())

    def remember(self) -> None:
        """At the end of the run: canvas decoders have no memory."""

    def _read(self, reading: Reading) -> Steps:
        feed = CanvasFeed(self, self._pass_of(reading))
        yield [feed]
        raw = self._spread(feed.logits, feed.work)
        rows = self._rows(raw, self._masks(raw))
        if not reading.supposed:
            self._last_rows = rows
        return rows

    def _pass_of(self, reading: Reading) -> CanvasPass:
        """What a forward computes, with positions counted from the beginning of the prompt."""
        start, answer = self.sequence.start, list(self.ids)
        for position, token in reading.supposed.items():
            answer[position] = token
        prompt = [None] * start if reading.unprompted else self.tokens
        wanted = range(self.length) if reading.wanted is None else reading.wanted
        if not hasattr(self.model, "new_states"):
            return CanvasPass([*prompt, *answer], range(start, start + self.length))
        computed = None if reading.computed is None else sorted(start + position for position in reading.computed)
        return CanvasPass([*prompt, *answer], [start + position for position in wanted], computed, reading.states)

    def _spread(self, logits: Tensor, work: CanvasPass) -> Tensor:
        """Logits [G, V] of the answer; NaN for positions that were not wanted."""
        if len(work.predicted) == self.length:
            return logits
        raw = logits.new_full((self.length, logits.shape[1]), float("nan"))
        raw[[position - self.sequence.start for position in work.predicted]] = logits
        return raw

    def _rows(self, raw: Tensor, masks: Tensor | None = None) -> Rows:
        """Rows without a tree, in which node i is row i; with token masks [n, V] if there is a constraint."""
        rows = Rows("target", raw, self.sequence, TokenTree(), first=0)
        rows.masks = masks
        return rows

    def _masks(self, raw: Tensor) -> Tensor | None:
        """Tokens that a constraint allows, bool [G, V]: it restricts the first masked position, which the text reaches.

        Raises Refusal in a dead end.
        """
        if self._matcher is None or not self.masked:
            return None
        masks, first = torch.ones_like(raw, dtype=torch.bool), self.masked[0]
        own = self._only_the_end(raw) if self._ended(first) else self._allowed(first, raw.shape[1])
        if not bool(own.any()):
            raise Refusal(
                "The grammar allows no token of this model here, so the text cannot continue: loosen the grammar.",
                "constraint",
            )
        masks[first] = own.to(raw.device)
        return masks

    def _allowed(self, position: int, vocabulary: int) -> Tensor:
        """What may follow the text before a position, bool [V]."""
        own = self._matcher.mask()[None, :vocabulary]
        if self._constraint.narrows:
            own = self._constraint.narrow(own, [[*self.tokens, *self.ids[:position]]])
        return own[0]

    def _only_the_end(self, raw: Tensor) -> Tensor:
        """Nothing but end tokens, bool [V]."""
        own = torch.zeros(raw.shape[1], dtype=torch.bool)
        own[sorted(self.model.end_ids)] = True
        return own

    def _ended(self, position: int) -> bool:
        """Whether the text ends before a position."""
        return position > 0 and self.ids[position - 1] is not None and self.ends(self.ids[position - 1])

    def _follow(self, position: int, token: int) -> None:
        """Advance the constraint by a token that is filled. Raises ValueError unless it is the next of the text."""
        if self._matcher is None or self._ended(position) and self.ends(token):
            return
        if position != self.masked[0] or not self._matcher.advance(token):
            raise ValueError(f"position {position} cannot be filled under a constraint: it fills {self.masked[0]} next")

    def _fill(self, positions: list[int], tokens: list[int], confidences: list[float]) -> None:
        if not positions or len(set(positions)) < len(positions) or not set(positions) <= set(self.masked):
            raise ValueError(
                f"positions {positions} cannot be filled: {self.masked} are masked, and each is filled once"
            )
        for position, token in zip(positions, tokens, strict=True):
            self._follow(position, token)
            self.ids[position] = token
            if self._last_rows:
                self._logits_at_fill[position] = self._last_rows.raw[position]
                if self._last_rows.masks is not None:
                    self._masks_at_fill[position] = self._last_rows.masks[position]
        pieces = [self.piece(token) for token in tokens]
        self.record(Fill(positions, tokens, pieces, confidences, self._entropies(positions)))
        if not self.masked:
            self._complete()

    def _entropies(self, positions: list[int]) -> list[float]:
        """Entropies in nats of the rows that positions were filled from; empty if one of them was not predicted."""
        if self._last_rows is None:
            return []
        found = entropy(self._last_rows.raw[positions]).tolist()
        return [rounded(value) for value in found] if all(map(isfinite, found)) else []

    @property
    def limit(self) -> str:
        """What ended the text below the length that was asked for; nothing, since a canvas has that length."""
        return ""

    def _complete(self) -> None:
        """Commit the text up to the first end token or stop string; the rest remains on the canvas."""
        self.sequence.extend(self.ids)
        self.sequence.finish()
        self.events += self.recorder.committed(self._committed(self.sequence.written), 0, self.text)
        unfinished = self._matcher is not None and not self._matcher.accepting
        stopped = self.sequence.reason == "stop_string"
        self.reason = "stop_string" if stopped else "length" if unfinished else "end"

    def _committed(self, written: list[int]) -> list[CommittedToken]:
        """Each token with the logits of its position in the forward before it was filled; fixed ones have none."""
        index_of = {position: index for index, position in enumerate(self._logits_at_fill)}
        rows = self._rows(torch.stack(list(self._logits_at_fill.values())), self._stacked_masks()) if index_of else None
        return [
            CommittedToken(token, "sampled", rows, index_of[position])
            if position in index_of else CommittedToken(token, "forced")
            for position, token in enumerate(written)
        ]

    def _stacked_masks(self) -> Tensor | None:
        """The token masks of all filled positions, bool [n, V]; None without a constraint."""
        if not self._masks_at_fill:
            return None
        free = torch.ones_like(next(iter(self._masks_at_fill.values())))
        return torch.stack([self._masks_at_fill.get(position, free) for position in self._logits_at_fill])


def _check(limits: Limits) -> None:
    """Raise Refusal for limits that a canvas does not support."""
    if limits.forced:
        raise Refusal(
            "A canvas does not grow from left to right, so it cannot begin with other tokens: run it again with "
            "another seed.",
            "forced",
        )
