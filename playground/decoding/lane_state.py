"""What streams read from their lane, as a protocol, so that they do not import it."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from playground.contract import EarlyExit
    from playground.contract.token_tree import TokenTree
    from playground.decoding.limits import Limits
    from playground.decoding.rows import Rows
    from playground.decoding.sequence import Sequence
    from playground.engine.expert_routing import ExpertRouting
    from playground.engine.model import Model
    from playground.events import Event


class PrefixPool(Protocol):
    """Prompts that the lanes of a session share (`decoding.shared_prefix.SharedPrefixes`)."""

    def of(self, stream: Any) -> Any:
        """The shared prefix that a stream starts with, or None."""


class LaneState(Protocol):
    """Text, limits and vocabulary of a lane, and the few things a stream reports back."""

    limits: Limits
    main: Sequence
    target_model: Model
    prompt_length: int
    vocabulary: int
    tokens: list[int]  # prompt included
    generated: int
    candidates: int  # most probable tokens of each row that are recorded
    reason: str | None
    inner: list[EarlyExit]  # early exits that the lane's strategies read
    prefixes: PrefixPool

    def captures(self, stream: str) -> frozenset[int]:
        """Layers of a stream before which hidden states are captured."""

    def state_layers(self, stream: str) -> tuple[int, ...]:
        """Layers of a stream whose inputs are kept for every committed token."""

    def shows_hidden(self, stream: str) -> bool:
        """Whether the rows of a stream carry the input of its lm_head."""

    def commit_forced(self, rows: Rows) -> None:
        """Commit the tokens that a fork of a run begins with."""

    def branch_tree(self, leaves: list[Sequence]) -> TokenTree:
        """The tree of all tokens that parallel sequences generated since they were forked."""

    def routing(self, stream: str) -> ExpertRouting | None:
        """Which experts run in a forward of a stream, and which did; None for a model without experts."""

    def readings(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """By stream: the model (by id) and the prompt that it reads."""

    def record(self, event: Event) -> None:
        """Record an event of this lane."""
