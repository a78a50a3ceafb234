"""A constraint on a canvas: the matcher follows the text from left to right, as far as it is filled."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import Constraint
    from playground.decoding.canvas.text import CanvasText
    from playground.grammar.matcher import Matcher


class CanvasGrammar:
    """The constraint of one canvas, and the matcher of its text."""

    def __init__(self, canvas: CanvasText, constraint: Constraint):
        self.canvas, self.constraint, self.matcher = canvas, constraint, _matcher_of(canvas, constraint)

    @property
    def unfinished(self) -> bool:
        return not self.matcher.accepting

    def masks(self, raw: Tensor) -> Tensor | None:
        """Tokens that it allows, bool [G, V]: it restricts the first masked position, which the text reaches.

        Raises Refusal in a dead end.
        """
        if not self.canvas.masked:
            return None
        masks, first = torch.ones_like(raw, dtype=torch.bool), self.canvas.masked[0]
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
        own = self.matcher.mask()[None, :vocabulary]
        if self.constraint.narrows:
            own = self.constraint.narrow(own, [[*self.canvas.tokens, *self.canvas.known(position)]])
        return own[0]

    def _only_the_end(self, raw: Tensor) -> Tensor:
        """Nothing but end tokens, bool [V]."""
        own = torch.zeros(raw.shape[1], dtype=torch.bool)
        own[sorted(self.canvas.model.end_ids)] = True
        return own

    def _ended(self, position: int) -> bool:
        """Whether the text ends before a position."""
        before = self.canvas.ids[position - 1] if position > 0 else None
        return before is not None and self.canvas.ends(before)

    def follow(self, position: int, token: int) -> None:
        """Advance the constraint by a token that is filled. Raises ValueError unless it is the next of the text."""
        if self._ended(position) and self.canvas.ends(token):
            return
        if position != self.canvas.masked[0] or not self.matcher.advance(token):
            raise ValueError(
                f"position {position} cannot be filled under a constraint: it fills {self.canvas.masked[0]} next"
            )


def _matcher_of(canvas: CanvasText, constraint: Constraint) -> Matcher:
    """Follows the text from left to right. Raises Refusal for what has no grammar, or no engine for one."""
    model = canvas.model
    if not hasattr(model, "grammars"):
        raise Refusal(f"{model.name} is a table and takes no constraint: remove {constraint.title}.", "model")
    if constraint.checker():
        raise Refusal(
            f"{constraint.title} checks texts by a program and has no grammar that a canvas can follow: remove it.",
            constraint.name,
        )
    model.tokens.check_constrainable(canvas.prompt)
    constraint.begin(canvas.sequence.start, model.tokens.bytes)
    return constraint.matcher(model.grammars.compile(*constraint.grammar()))
