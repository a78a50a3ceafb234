"""The canvas: one strategy's run over positions that are filled in any order. Canvas decoders know it as `lm`.

    rows = yield lm.read()                             one forward: a row for every position of the answer
    token = lm.pick(rows, position)                    a token from a row, by chance as far as the temperature leaves
    any
    yield lm.fill(positions, tokens, confidences)      these positions are settled and never change again

It is to a canvas decoder what Lane is to others, and offers the session the same. The text is committed when nothing is
masked any more, up to its first end token or stop string.
"""
from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.contract.token_tree import TokenTree
from playground.decoding.recorder import Kept, Recorder
from playground.decoding.requests import Immediate, Request
from playground.decoding.rng import Draws
from playground.decoding.rows import Rows
from playground.decoding.sampler_chain import Chain
from playground.decoding.sequence import Bounds, Sequence
from playground.engine.tokens import Reader
from playground.errors import Refusal
from playground.events import Event, Fill, Forward, Reason

if TYPE_CHECKING:
    from playground.contract import Decoder
    from playground.contract.lane_config import Assembly
    from playground.decoding.limits import Limits
    from playground.engine.model import Model
    from playground.engine.table_denoiser import OracleDenoiser


def check_fit(decoder: Decoder, model: Model | OracleDenoiser) -> None:
    """Raise Refusal where the decoder wants to fill and the model continues text, or the other way round."""
    fills, wanted = getattr(model, "fills", False), decoder.kind == "canvas_decoder"
    if fills and not wanted:
        raise Refusal(
            f"{model.name} fills masked positions and does not continue text: choose masked_diffusion or another model.",
            "model",
        )
    if wanted and not fills:
        raise Refusal(
            f"{model.name} continues text and cannot fill masked positions: choose the oracle as the model.", "model"
        )


class Canvas:
    def __init__(
        self,
        prompt: list[int],
        models: dict[str, OracleDenoiser],
        assembly: Assembly,
        limits: Limits,
        recorder: Recorder,
    ):
        self.model, self.recorder = models["target"], recorder
        self.length = self.model.answer_length(prompt)  # positions to fill
        _check(limits, self.length)
        self.ids: list[int | None] = [None] * self.length  # None is masked
        self.draws = Draws(limits.seed)
        self.reason: Reason | None = None
        self.events: list[Event] = []  # not handed out yet
        bounds = Bounds(len(prompt) + limits.max_new_tokens, self.model.end_ids, limits.stop)
        chain = Chain(assembly.samplers, None, self.model.end_ids)
        # the prompt, until the answer joins it
        self.sequence = Sequence(0, prompt, bounds, chain, Reader(self.model.tokens))
        self._seen: Rows | None = None  # what was read last
        self._behind: dict[int, Tensor] = {}  # each filled position's raw row [V] of the pass before
        self._asked: Immediate | None = None  # the last request to fill

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
        """Positions without a token, ascending; the first after the prompt is 0."""
        return [position for position, token in enumerate(self.ids) if token is None]

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self.model.end_ids

    def piece(self, token: int) -> str:
        """What a screen shows for a token."""
        return self.model.tokens.piece(token)

    # --- what a strategy asks for ---

    def read(self) -> Request:
        """The whole canvas through the model; answers with Rows whose node j is position j: raw log-probabilities [G,
        V].
        """
        return Immediate(self._read)

    def fill(self, positions: Iterable[int], tokens: Iterable[int], confidences: Iterable[float]) -> Request:
        """Settle masked positions. `confidences` are probabilities for people to look at; raises ValueError for a
        filled position.
        """
        if self._asked and not self._asked.served:
            raise RuntimeError("positions were to be filled and were not: write `yield lm.fill(…)`")
        self._asked = Immediate(lambda: self._fill(list(positions), list(tokens), list(confidences)))
        return self._asked

    # --- chance ---

    def pick(self, rows: Rows, position: int, purpose: str = "token") -> int:
        """A token for a position: drawn from its distribution, or its best where nothing is left to chance."""
        if not rows.chain.draws:
            return rows.best(position)
        return self.draw(rows.p[rows.row(position)], position, purpose)

    def draw(self, p: Tensor, position: int, purpose: str) -> int:
        """An index from any distribution p [n], for a position of the canvas."""
        return self.draws.pick(p, purpose, self.sequence.start + position)

    def flip(self, probability: float, position: int, purpose: str) -> tuple[bool, float]:
        """True with the given probability, and the uniform number that decided."""
        return self.draws.flip(probability, purpose, self.sequence.start + position)

    # --- how the canvas fills ---

    def record(self, event: Event) -> None:
        """Note a fact."""
        self.events.append(event)

    def begin(self) -> None:
        """Before the first forward: nothing is known of an answer yet."""

    def remember(self) -> None:
        """At the end: canvas decoders learn nothing for later runs."""

    def _read(self) -> Rows:
        canvas = [*self.tokens, *self.ids]
        start = perf_counter()
        marginals = self.model.denoise(canvas)
        seconds = perf_counter() - start
        depth = self.model.depth
        self.record(
            Forward(tokens=len(canvas), layers=depth, seconds=seconds, flops=self.model.flops(len(canvas), 0, depth))
        )
        self._seen = self._rows(marginals[self.sequence.start:])
        return self._seen

    def _rows(self, raw: Tensor) -> Rows:
        """Rows without a tree: node i is row i."""
        return Rows("target", raw, self.sequence, TokenTree(), first=0)

    def _fill(self, positions: list[int], tokens: list[int], confidences: list[float]) -> None:
        if not positions or len(set(positions)) < len(positions) or not set(positions) <= set(self.masked):
            raise ValueError(
                f"positions {positions} cannot be filled: masked are {self.masked}, and each is filled once"
            )
        for position, token in zip(positions, tokens, strict=True):
            self.ids[position] = token
            if self._seen:
                self._behind[position] = self._seen.raw[position]
        self.record(Fill(positions, tokens, [self.piece(token) for token in tokens], confidences))
        if not self.masked:
            self._complete()

    def _complete(self) -> None:
        """The text is what stands up to the first end token or stop string; what follows it stays on the canvas."""
        for token in self.ids:
            self.sequence.append(token)
            if self.sequence.reason:
                break
        self.sequence.finish()
        self.events += self.recorder.committed(self._kept(self.sequence.written), 0, self.text)
        self.reason = "stop_string" if self.sequence.reason == "stop_string" else "end"

    def _kept(self, written: list[int]) -> list[Kept]:
        """Each token with the row of the pass before it was filled."""
        places = {position: place for place, position in enumerate(self._behind)}
        rows = self._rows(torch.stack(list(self._behind.values()))) if places else None
        return [
            Kept(token, "sampled", rows if i in places else None, places.get(i, 0)) for i, token in enumerate(written)
        ]


def _check(limits: Limits, length: int) -> None:
    """Refuse what has no meaning on a canvas."""
    if limits.forced:
        raise Refusal(
            "A canvas does not grow from left to right, so it cannot begin with other tokens: run it again with another seed.",
            "forced",
        )
    if limits.max_new_tokens < length:
        raise Refusal(
            f"{length} positions are to be filled after this prompt, and only {limits.max_new_tokens} tokens are allowed: "
            f"allow at least {length}.",
            "max_new_tokens",
        )
