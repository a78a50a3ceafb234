"""Constraints: which tokens are allowed next?"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from playground.contract.base import Strategy

if TYPE_CHECKING:
    import torch

    from playground.events import Event
    from playground.grammar.matcher import Grammar, Matcher


class Checker(Protocol):
    """A black box that checks texts, as bytes after the prompt; the last character may be incomplete."""

    def viable(self, text: bytes) -> bool:
        """Whether a text can be extended to a complete one. It may give false positives, but no false negatives."""

    def complete(self, text: bytes) -> bool:
        """Whether a text may end here."""


class Constraint(Strategy):
    """Declares a grammar, or a checker. The lane keeps the matcher's state in step with the text."""

    kind = "constraint"
    narrows_forced: ClassVar[bool] = False  # `permits` may forbid a token to which the grammar has no alternative

    def grammar(self) -> tuple[str, str]:
        """Kind and source of the grammar: json_schema, regex, lark, gbnf, choice, triggered, template or tags."""
        raise NotImplementedError

    def check_source(self) -> None:
        """Raise Refusal for a grammar that only this strategy cannot use; called while the grammar is edited."""

    def remarks(self) -> list[str]:
        """What a person should know about the grammar before a run, in sentences. Called after `check_source`."""
        return []

    def checker(self) -> Checker | None:
        """A black-box checker in place of a grammar, or None. A mask takes one call per token; `awrs` makes few.
        """
        return None

    def matcher(self, grammar: Grammar) -> Matcher:
        """The state of a text in the compiled grammar, after `begin`; override it to compute masks in another way."""
        return grammar.matcher()

    def begin(self, start: int, spelling: Callable[[int], bytes]) -> None:
        """Receive the prompt length in tokens, and a function from token id to its bytes, before the first row."""

    def narrow(self, masks: torch.Tensor, histories: Sequence[list[int]]) -> torch.Tensor:
        """Further restrict the grammar's token masks, bool [n, V]; `histories` are the tokens before each row."""
        return masks

    def permits(self, history: list[int], token: int, vocabulary: int) -> bool:
        """The value of `narrow` for one token that the grammar allows; implement both or none."""
        return True

    def dead_end(self, history: list[int]) -> str:
        """Why no token is left after `history`, in a sentence with a space before it; empty if nothing is known."""
        return ""

    def explain(self, history: list[int], token: int) -> Iterator[Event]:
        """Yield what to show about a committed token; `history` are the tokens before it, prompt included."""
        yield from ()

    def tools_to_describe(self) -> str:
        """Tools, a list in JSON, that the model's chat template describes in the prompt of this lane; none if empty."""
        return ""

    @property
    def narrows(self) -> bool:
        """Whether `narrow` is implemented."""
        return type(self).narrow is not Constraint.narrow

    @property
    def explains(self) -> bool:
        """Whether `explain` is implemented."""
        return type(self).explain is not Constraint.explain
