"""What streams read from their lane beside what strategies do, as a protocol, so that they do not import it."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from playground.contract.lane import Lane

if TYPE_CHECKING:
    from playground.contract import EarlyExit
    from playground.contract.token_tree import TokenTree
    from playground.decoding.limits import Limits
    from playground.decoding.rows import Rows
    from playground.decoding.sequence import Sequence
    from playground.engine.expert_routing import ExpertRouting


class PrefixPool(Protocol):
    """Prompts that the lanes of a session share (`decoding.shared_prefix.SharedPrefixes`)."""

    def of(self, stream: Any) -> Any:
        """The shared prefix that a stream starts with, or None."""


class LaneState(Lane, Protocol):
    """A lane with what a run, but no strategy, reads of it. The layers of `decoding.lane` from `streams` on are one."""

    limits: Limits
    main: Sequence
    inner: list[EarlyExit]  # early exits that the lane's strategies read
    prefixes: PrefixPool

    @property
    def candidates(self) -> int:
        """Most probable tokens of each row that are recorded."""
        raise NotImplementedError

    def captures(self, stream: str) -> frozenset[int]:
        """Layers of a stream before which hidden states are captured; the depth means after the last layer."""
        raise NotImplementedError

    def state_layers(self, stream: str) -> tuple[int, ...]:
        """Layers of a stream whose inputs `stream.states` keeps for every committed token; the target's only."""
        raise NotImplementedError

    def shows_hidden(self, stream: str) -> bool:
        """Whether the rows of a stream carry the input of its lm_head."""
        raise NotImplementedError

    def routing(self, stream: str) -> ExpertRouting | None:
        """Which experts run in a forward of a stream, and which did; None for a model without experts.

        Without a sampler that chooses experts, only those of the target itself are noted.
        """
        raise NotImplementedError

    def readings(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """By stream, the model (by id) and the prompt it reads.

        The target is excluded if there is a cache or compute policy, which needs a cache of its own, and if the decoder
        replaces the prompt.
        """
        raise NotImplementedError

    def commit_forced(self, rows: Rows) -> None:
        """Commit the tokens of the tree of `rows`, a chain of given tokens: those that a fork of a run begins with."""
        raise NotImplementedError

    def branch_tree(self, leaves: list[Sequence]) -> TokenTree:
        """The tree of all tokens that live sequences generated since they were forked, with those of `leaves` added."""
        raise NotImplementedError
