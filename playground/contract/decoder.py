"""Decoders: how does the text grow?"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from playground.contract.base import Strategy

if TYPE_CHECKING:
    from playground.contract.lane import Lane


class Decoder(Strategy):
    """Decides how the text grows: a generator that yields events and requests."""

    kind = "decoder"
    # kinds or names of toggles it cannot work with; "drawing": samplers that draw
    refuses: ClassVar[tuple[str, ...]] = ()
    several: ClassVar[bool] = False  # several sequences grow side by side
    whole_answers: ClassVar[bool] = False  # chooses among whole answers, so a text may end before the requested length
    owns_constraint: ClassVar[bool] = False  # rows arrive unmasked with rows.masks; the decoder enforces the constraint
    checks_tokens: ClassVar[bool] = False  # rows come without masks; the decoder asks `rows.allows(token)`
    # ranks texts by their probability, so forced tokens and the end token take a forward each, and count
    counts_forced: ClassVar[bool] = False
    replaces_prompt: ClassVar[bool] = False  # the target reads something else in its place; see `lm.replace_prompt`
    known_by: ClassVar[str] = ""  # the slot whose part names a lane where it is not the default
    views: ClassVar[tuple[str, ...]] = ()  # streams of the target over the prompt with another passage; see `passages`

    def decode(self, lm: Lane) -> Iterator:
        """Yield events and requests. `lm` closes the generator when the text is complete."""
        raise NotImplementedError

    def toggles(self) -> list[Strategy]:
        """Toggles the decoder adds itself, before those a person adds."""
        return []

    def thinking_tags(self) -> tuple[str, str] | None:
        """The start and the end tag of the thinking part, if the strategy has some of its own; None: the model's."""
        return None

    def passages(self, passage: str, question: str) -> dict[str, str]:
        """For each of its views, the passage that replaces the prompt's own; empty for none."""
        return {}


class CanvasDecoder(Decoder):
    """Decides which masked positions are filled next. Toggles for left-to-right text do not apply, except a constraint
    where positions are filled from left to right.

    attention: of the models that it can run on. "full": all positions see each other; "block": a position sees its
    block and earlier ones, so the blocks of `lm.blocks` are filled in order; "known_first": causal attention, known
    tokens before masked ones; "noise": random tokens instead of masks.
    """

    kind = "canvas_decoder"
    attention = ("full",)
    refuses = ("sampler", "cache_policy", "compute_policy", "overlay")

    def decode(self, lm: Any) -> Iterator:
        """Yield events and requests; `lm` is a `playground.decoding.canvas.Canvas`."""
        raise NotImplementedError

    @property
    def left_to_right(self) -> bool:
        """Whether each forward fills the first masked position alone, so that a grammar can follow the text."""
        return False


class Preset(Decoder):
    """A named combination: the complete system of a paper."""

    kind = "preset"
