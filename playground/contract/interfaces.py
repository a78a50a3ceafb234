"""What a strategy can access of its run, as protocols, so that the contract does not import the runtime.

`playground.decoding.lane.Lane` implements LaneInterface: strategies receive it as `lm`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract.token_tree import TokenTree


class SequenceInterface(Protocol):
    """One growing text of a lane."""

    number: int
    lineage: int  # key of its random numbers
    tokens: list[int]  # prompt included
    text: str
    reason: str | None  # why it ended, None while it grows


class RowsInterface(Protocol):
    """Logits after the committed text (the root, node -1) and after nodes of a draft tree, and results from them."""

    raw: Tensor  # logits [n, V]
    masks: Tensor | None  # tokens that the constraint allows, bool [n, V]
    tree: TokenTree

    @property
    def scores(self) -> Tensor:
        """Scores after masks and samplers, [n, V]."""

    @property
    def p(self) -> Tensor:
        """Distributions that tokens are sampled from, [n, V]; one-hot if no sampler draws."""

    @property
    def logp(self) -> Tensor:
        """The model's own log-probabilities, before masks and samplers, [n, V]."""

    def allows(self, token: int) -> bool:
        """Whether the constraint allows a token at the end of the text, without its mask."""

    def distribution(self, node: int = -1) -> Tensor:
        """The row of `p` after one node, [V]."""

    def entropy(self, node: int = -1) -> float:
        """Entropy in nats of the model's own distribution after one node."""


class StreamInterface(Protocol):
    """One model in step with the lane's text."""

    def extend(self, tree: TokenTree | None = None) -> Any:
        """Request rows for the end of the text and for every node of a draft tree."""


class LaneInterface(Protocol):
    """The members of `lm` that strategies use most; `Lane` documents all of them."""

    tokens: list[int]  # everything committed, prompt included
    prompt_length: int
    vocabulary: int
    generated: int
    remaining: int  # tokens that may still be committed

    def replace_prompt(self, inputs: list[int | Tensor]) -> None:
        """Let the target read tokens and input embeddings [hidden_size] in place of the prompt, before its first
        forward.
        """

    def prefill(self) -> Any:
        """Request a forward over the prompt; answers with the row after it."""

    def extend(self, what: TokenTree | list[SequenceInterface] | None = None) -> Any:
        """Request one forward: rows for a draft tree, or one row for the end of each sequence."""

    def pick(self, rows: RowsInterface, node: int = -1, purpose: str = "token") -> Any:
        """Choose a token after `node`: sampled if a sampler draws, argmax otherwise."""

    def keep(self, what: Any) -> Any:
        """Commit a choice, the accepted path of a verdict, or the text of a sequence."""

    def stream(self, name: str) -> StreamInterface:
        """Another model, or the target over another prompt, that follows the same text."""

    def fork(self, count: int, leaf: SequenceInterface | None = None) -> list[SequenceInterface]:
        """Start `count` sequences at the end of the text, or of a sequence."""

    def drop(self, leaves: Iterable[SequenceInterface]) -> None:
        """Discard sequences and free their KV slots."""

    def pause(self) -> Any:
        """Request to let other lanes go first, between two parts of a long computation."""

    def draw(self, p: Tensor, position: int, purpose: str) -> int:
        """Sample a token from a distribution p [V]."""

    def flip(self, probability: float, position: int, purpose: str = "accept") -> tuple[bool, float]:
        """True with the given probability, and the uniform number that decided."""

    def memory(self, name: str, make: Callable[[], Any], *about: object) -> Any:
        """What a strategy learned in earlier runs of the same visitor with this model."""
