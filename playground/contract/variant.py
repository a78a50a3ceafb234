"""Variants: a changed copy of a model, as a new entry of the model catalogue."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from playground.contract.base import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from playground.events import Figure, Note


class Variant(Strategy):
    """Trains or edits a copy of a model."""

    kind = "variant"
    adjective: ClassVar[str] = ""  # what the model becomes: the entry is titled "Pocket, hyperfitted"

    def make(self, network: PreTrainedModel, texts: list[list[int]], seed: int) -> Iterator[Figure | Note]:
        """Change `network`, with float32 weights, in place. The change is complete when the generator ends.

        `texts` are token ids. Yields measurements on the way; the same seed gives the same weights. Raises Refusal.
        """
        raise NotImplementedError
