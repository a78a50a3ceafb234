"""The text on a canvas: its tokens, its positions, and the blocks within which its model sees in both directions."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from playground.engine.canvas.block_denoiser import BlockDenoiser

if TYPE_CHECKING:
    from playground.decoding.sequence import Sequence
    from playground.engine.canvas.denoiser import CanvasNetwork
    from playground.engine.canvas.table_denoiser import OracleDenoiser


class CanvasText:
    """What a strategy reads of a canvas without a forward."""

    model: OracleDenoiser | CanvasNetwork
    sequence: Sequence
    length: int  # positions to fill
    ids: list[int | None]  # None is masked
    name = "target"  # of the stream that its forwards are reported for

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

    def known(self, stop: int) -> list[int]:
        """The tokens filled before a position, in order."""
        return [token for token in self.ids[:stop] if token is not None]

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""
        return token in self.model.end_ids

    def piece(self, token: int) -> str:
        """The text that is displayed for a token."""
        return self.model.tokens.piece(token)

    def spell(self, text: str) -> list[int]:
        """A text as token ids, without special tokens."""
        return self.model.tokens.encode_continuation(text)

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
        if isinstance(self.model, BlockDenoiser):
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
