"""The canvas itself."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING

from torch import Tensor

from playground.contract.model_fit import attention_of, check_model
from playground.contract.token_tree import TokenTree
from playground.decoding import fitted_weights as fitted
from playground.decoding.canvas.filled_rows import FilledRows
from playground.decoding.canvas.grammar import CanvasGrammar
from playground.decoding.canvas.reading import CanvasFeed, Reading
from playground.decoding.canvas.revision import Revision
from playground.decoding.canvas.text import CanvasText
from playground.decoding.recorder import Recorder
from playground.decoding.requests import Immediate, Request, Steps
from playground.decoding.rng import Draws
from playground.decoding.rows import Rows
from playground.decoding.sampler_chain import Chain
from playground.decoding.sequence import Bounds, Sequence
from playground.engine.sampling import entropy
from playground.engine.text.token_bytes import Reader
from playground.errors import Refusal
from playground.events import Event, Fill, Note, Reason, rounded

if TYPE_CHECKING:
    from playground.contract import Decoder
    from playground.contract.assembly import Assembly
    from playground.decoding.limits import Limits
    from playground.engine.canvas.denoiser import CanvasNetwork, CanvasStates
    from playground.engine.canvas.table_denoiser import OracleDenoiser
    from playground.engine.model import Model


def check_fit(decoder: Decoder, model: Model | CanvasNetwork | OracleDenoiser) -> None:
    """Raise Refusal if the decoder fills masked positions and the model continues text, or vice versa, or if it cannot
    run with the model's attention.
    """
    check_model(decoder, model.name, attention_of(model))


class Canvas(CanvasText):
    """The answer of one lane, filled position by position."""

    def __init__(
        self,
        prompt: list[int],
        models: dict[str, OracleDenoiser | CanvasNetwork],
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
        self.grammar = CanvasGrammar(self, assembly.constraint) if assembly.constraint else None
        self._last_rows: Rows | None = None
        self._filled = FilledRows()
        self._last_fill: Immediate | None = None  # the last request to fill

    # --- requests ---

    def read(self, *given, **named) -> Request:
        """Request a forward over the canvas. Answers with Rows whose node j is position j: logits [G, V], NaN for
        positions that are not wanted; node G + k is the k-th shadow. Arguments as of `Reading`.

        A table always predicts and computes everything. Raises ValueError if a wanted position is predicted by one that
        is not computed.
        """
        reading = Reading(*given, **named)
        return Request(self._read(reading))

    def cache_bytes(self) -> int:
        """Not counted: a canvas has states of its own positions at most, whose number is limited before the run."""
        return 0

    def new_states(self, shadows: int = 0) -> CanvasStates | None:
        """Empty key and value states of this canvas and of so many shadows. Raises Refusal for a table, which has none.
        """
        if not hasattr(self.model, "new_states"):
            raise Refusal(
                f"{self.model.name} is a table without key and value states, so there is nothing to cache: choose a "
                "neural denoiser such as pocket-diffusion.",
                "model",
            )
        return self.model.new_states(self.sequence.start + self.length + shadows)

    def rows_of(self, raw: Tensor) -> Rows:
        """Rows with these logits [G, V], which a decoder computed from those of forwards."""
        return self._rows(raw, self.grammar.masks(raw) if self.grammar else None)

    def based_on(self, rows: Rows | None) -> None:
        """Record that the next fill follows from these rows, not from the last forward over the canvas; from none if
        its tokens are fixed.
        """
        self._last_rows = rows

    def fill(self, positions: Iterable[int], tokens: Iterable[int], confidences: Iterable[float]) -> Request:
        """Request to fill masked positions; `confidences` are probabilities to display.

        Raises ValueError for a position that is not masked, or is listed twice.
        """
        filled = list(positions)
        return self._filling(lambda: self._fill(filled, list(tokens), list(confidences)))

    def revise(
        self, tokens: Mapping[int, int], confidences: Mapping[int, float], remasked: Collection[int] = ()
    ) -> Request:
        """Request to fill masked positions, put other tokens in place of filled ones, and mask others again, as one
        step. Tokens and the probabilities to display are by position. The text may be revised until `complete` is
        yielded.

        Raises ValueError for a position that is filled and masked at once, listed twice, or masked again while it is
        masked.
        """
        change = Revision(tokens, confidences, remasked)
        return self._filling(lambda: self._revise(change))

    def complete(self) -> Request:
        """Request to commit the text of a canvas that was revised. Raises ValueError while a position is masked."""
        if self.masked:
            raise ValueError(f"positions {self.masked} are masked, so the text is not complete")
        return self._filling(self._complete)

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
        if self.grammar:
            self.events += map(Note, self.grammar.constraint.remarks())

    def remember(self) -> None:
        """At the end of the run: canvas decoders have no memory."""

    def _read(self, reading: Reading) -> Steps:
        feed = CanvasFeed(self, reading.over(self))
        yield [feed]
        rows = self.rows_of(feed.spread())
        if not reading.supposed:
            self._last_rows = rows
        return rows

    def _rows(self, raw: Tensor, masks: Tensor | None = None) -> Rows:
        """Rows without a tree, in which node i is row i; with token masks [n, V] if there is a constraint."""
        rows = Rows("target", raw, self.sequence, TokenTree(), first=0)
        rows.masks = masks
        return rows

    def _filling(self, work: Callable[[], None]) -> Request:
        if self._last_fill and not self._last_fill.served:
            raise RuntimeError("a fill was requested but not yielded: write `yield lm.fill(…)`")
        self._last_fill = Immediate(work)
        return self._last_fill

    def _fill(self, positions: list[int], tokens: list[int], confidences: list[float]) -> None:
        if not positions or len(set(positions)) < len(positions) or not set(positions) <= set(self.masked):
            raise ValueError(
                f"positions {positions} cannot be filled: {self.masked} are masked, and each is filled once"
            )
        self._put(positions, tokens)
        pieces = [self.piece(token) for token in tokens]
        self.record(Fill(positions, tokens, pieces, confidences, self._entropies(positions)))
        if not self.masked:
            self._complete()

    def _revise(self, change: Revision) -> None:
        change.check(self.ids)
        held = {i: self.piece(token) for i, token in enumerate(self.ids) if token is not None}
        positions, tokens = list(change.tokens), list(change.tokens.values())
        self._put(positions, tokens)
        for position in change.remasked:
            self.ids[position] = None
        self.record(Fill(
            positions, tokens, [self.piece(token) for token in tokens], [change.confidence[i] for i in positions],
            self._entropies(positions), replaced={i: held[i] for i in positions if i in held},
            remasked={i: held[i] for i in change.remasked},
        ))

    def _put(self, positions: list[int], tokens: list[int]) -> None:
        for position, token in zip(positions, tokens, strict=True):
            if self.grammar:
                self.grammar.follow(position, token)
            self.ids[position] = token
            if self._last_rows:
                self._filled.add(position, self._last_rows)

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
        self.sequence.extend(self.known(self.length))
        self.sequence.finish()
        filled = self._filled.committed(self.sequence.written, self._rows)
        steps, commit = self.recorder.committed(filled, 0, self.text)
        self.events += [*steps, commit]
        unfinished = self.grammar is not None and self.grammar.unfinished
        stopped = self.sequence.reason == "stop_string"
        self.reason = "stop_string" if stopped else "length" if unfinished else "end"


def _check(limits: Limits) -> None:
    """Raise Refusal for limits that a canvas does not support."""
    if limits.forced:
        raise Refusal(
            "A canvas does not grow from left to right, so it cannot begin with other tokens: run it again with "
            "another seed.",
            "forced",
        )
