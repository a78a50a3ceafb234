"""The canvas: one strategy's run over positions that are filled in any order. Canvas decoders receive it as `lm`.

    rows = yield lm.read()                             one forward: a row for every position of the answer
    token = lm.pick(rows, position)                    choose a token: sampled if a sampler draws, argmax otherwise
    yield lm.fill(positions, tokens, confidences)      fill these positions, which is final

It takes the place of Lane and has the same interface towards the session. The text is committed when no position is
masked, up to its first end token or stop string.
"""
from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.contract.token_tree import TokenTree
from playground.decoding.recorder import CommittedToken, Recorder
from playground.decoding.requests import Immediate, Request
from playground.decoding.rng import Draws
from playground.decoding.rows import Rows
from playground.decoding.sampler_chain import Chain
from playground.decoding.sequence import Bounds, Sequence
from playground.engine.tokens import Reader
from playground.errors import Refusal
from playground.events import Event, Fill, Forward, Reason, rounded

if TYPE_CHECKING:
    from playground.contract import Decoder
    from playground.contract.lane_config import Assembly
    from playground.decoding.limits import Limits
    from playground.engine.model import Model
    from playground.engine.table_denoiser import OracleDenoiser


def check_fit(decoder: Decoder, model: Model | OracleDenoiser) -> None:
    """Raise Refusal if the decoder fills masked positions and the model continues text, or vice versa."""
    fills, wanted = getattr(model, "fills", False), decoder.kind == "canvas_decoder"
    if fills and not wanted:
        raise Refusal(
            f"{model.name} fills masked positions and does not continue text: choose Masked diffusion or another "
            "model.",
            "model",
        )
    if wanted and not fills:
        raise Refusal(
            f"{model.name} continues text and cannot fill masked positions: choose the oracle as the model.", "model",
        )


class Canvas:
    """The answer of one lane, filled position by position."""

    def __init__(
        self,
        prompt: list[int],
        models: dict[str, OracleDenoiser],
        assembly: Assembly,
        limits: Limits,
        recorder: Recorder,
    ):
        self.model = self.target_model = models["target"]
        self.recorder = recorder
        self.length = self.model.answer_length(prompt)  # positions to fill
        _check(limits, self.length)
        self.ids: list[int | None] = [None] * self.length  # None is masked
        self.draws = Draws(limits.seed)
        self.reason: Reason | None = None
        self.events: list[Event] = []  # not yet delivered
        bounds = Bounds(len(prompt) + limits.max_new_tokens, self.model.end_ids, limits.stop)
        chain = Chain(assembly.samplers, None, self.model.end_ids)
        # the prompt; the answer is appended once it is complete
        self.sequence = Sequence(0, prompt, bounds, chain, Reader(self.model.tokens))
        self._last_rows: Rows | None = None
        self._logits_at_fill: dict[int, Tensor] = {}  # by filled position, its logits [V] in the forward before
        self._last_fill: Immediate | None = None  # the last request to fill

    # --- what a strategy reads ---

    @property
    def tokens(self) -> list[int]:
        """The prompt, and the answer once it is complete."""
        return self.sequence.tokens

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

    # --- requests ---

    def read(self) -> Request:
        """Request a forward over the canvas. Answers with Rows whose node j is position j: log-probabilities [G, V]."""
        return Immediate(self._read)

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
        """Before the first forward: a canvas commits nothing yet."""

    def remember(self) -> None:
        """At the end of the run: canvas decoders have no memory."""

    def _read(self) -> Rows:
        canvas = [*self.tokens, *self.ids]
        start = perf_counter()
        marginals = self.model.denoise(canvas)
        seconds = rounded(perf_counter() - start)
        depth = self.model.depth
        self.record(
            Forward(tokens=len(canvas), layers=depth, seconds=seconds, flops=self.model.flops(len(canvas), 0, depth))
        )
        self._last_rows = self._rows(marginals[self.sequence.start:])
        return self._last_rows

    def _rows(self, raw: Tensor) -> Rows:
        """Rows without a tree, in which node i is row i."""
        return Rows("target", raw, self.sequence, TokenTree(), first=0)

    def _fill(self, positions: list[int], tokens: list[int], confidences: list[float]) -> None:
        if not positions or len(set(positions)) < len(positions) or not set(positions) <= set(self.masked):
            raise ValueError(
                f"positions {positions} cannot be filled: {self.masked} are masked, and each is filled once"
            )
        for position, token in zip(positions, tokens, strict=True):
            self.ids[position] = token
            if self._last_rows:
                self._logits_at_fill[position] = self._last_rows.raw[position]
        self.record(Fill(positions, tokens, [self.piece(token) for token in tokens], confidences))
        if not self.masked:
            self._complete()

    def _complete(self) -> None:
        """Commit the text up to the first end token or stop string; the rest remains on the canvas."""
        for token in self.ids:
            self.sequence.append(token)
            if self.sequence.reason:
                break
        self.sequence.finish()
        self.events += self.recorder.committed(self._committed(self.sequence.written), 0, self.text)
        self.reason = "stop_string" if self.sequence.reason == "stop_string" else "end"

    def _committed(self, written: list[int]) -> list[CommittedToken]:
        """Each token with the logits of its position in the forward before it was filled."""
        index_of = {position: index for index, position in enumerate(self._logits_at_fill)}
        rows = self._rows(torch.stack(list(self._logits_at_fill.values()))) if index_of else None
        return [
            CommittedToken(token, "sampled", rows if position in index_of else None, index_of.get(position, 0))
            for position, token in enumerate(written)
        ]


def _check(limits: Limits, length: int) -> None:
    """Raise Refusal for limits that a canvas does not support."""
    if limits.forced:
        raise Refusal(
            "A canvas does not grow from left to right, so it cannot begin with other tokens: run it again with "
            "another seed.",
            "forced",
        )
    if limits.max_new_tokens < length:
        raise Refusal(
            f"This prompt has {length} positions to fill, but only {limits.max_new_tokens} tokens are allowed: "
            f"allow at least {length}.",
            "max_new_tokens",
        )
