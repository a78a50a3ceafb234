"""What a lane hands to a strategy: sequences, rows, choices, streams and requests, as protocols.

`playground.decoding` implements them; `playground.contract.lane` describes the lane itself.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from playground.contract.token_tree import ROOT

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract.base import Strategy
    from playground.contract.early_exit import EarlyExit
    from playground.contract.token_tree import TokenTree
    from playground.engine.model import Model


class ChainInterface(Protocol):
    """The mask and samplers of one sequence."""

    samplers: list[Strategy]
    constraint: Strategy | None
    draws: bool  # whether tokens are sampled; argmax otherwise
    reads_text: bool  # whether a mask or a sampler reads the tokens before a row


class SequenceInterface(Protocol):
    """One growing text of a lane."""

    number: int
    tokens: list[int]  # prompt included
    text: str
    logprobs: list[float | None]  # of the tokens after the prompt

    @property
    def reason(self) -> str | None:
        """Why it ended; None while it grows."""
        raise NotImplementedError

    @property
    def lineage(self) -> int:
        """Key of its random numbers."""
        raise NotImplementedError

    @property
    def written(self) -> list[int]:
        """Tokens after the prompt."""
        raise NotImplementedError

    @property
    def generated(self) -> int:
        """Number of tokens after the prompt."""
        raise NotImplementedError

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        raise NotImplementedError


class RowsInterface(Protocol):
    """Logits after the committed text (the root, node -1) and after nodes of a draft tree, and results from them.

    Row i of the tensors belongs to tree node `first` + i.
    """

    raw: Tensor  # logits [n, V]
    masks: Tensor | None  # tokens that the constraint allows, bool [n, V]
    tree: TokenTree
    first: int
    length: int  # tokens up to the root
    others: dict[str | EarlyExit, Tensor]  # logits [n, V] of other streams and early exits that were declared
    probes: Tensor | None  # logits [n, V] of the tree's probes, in order; None if this forward had none
    sequence: SequenceInterface
    chain: ChainInterface

    @property
    def committed(self) -> list[int]:
        """Tokens up to the root, prompt included."""
        raise NotImplementedError

    @property
    def hidden(self) -> Tensor | None:
        """Input of the lm_head, [n, hidden_size]; None if no strategy of the lane needs hidden states."""
        raise NotImplementedError

    @property
    def scores(self) -> Tensor:
        """Scores after masks and samplers, [n, V]."""
        raise NotImplementedError

    @property
    def p(self) -> Tensor:
        """Distributions that tokens are sampled from, [n, V]; one-hot if no sampler draws."""
        raise NotImplementedError

    @property
    def logp(self) -> Tensor:
        """The model's own log-probabilities, before masks and samplers, [n, V]."""
        raise NotImplementedError

    def row(self, node: int) -> int:
        """Index of the row of a node. Raises IndexError if the node was not part of this forward."""
        raise NotImplementedError

    def unread(self, node: int) -> bool:
        """Whether a node was added to the tree after this forward."""
        raise NotImplementedError

    def position(self, node: int) -> int:
        """Position in the sequence of the token that follows a node."""
        raise NotImplementedError

    def scores_of(self, nodes: list[int]) -> Tensor:
        """The scores [n, V] after nodes."""
        raise NotImplementedError

    def distribution(self, node: int = ROOT) -> Tensor:
        """The row of `p` after one node, [V]; cheaper than all of `p` for a large tree."""
        raise NotImplementedError

    def allowed_logp(self, node: int = ROOT) -> Tensor:
        """Log-probabilities after samplers, [V], of what may follow a node: -inf where the constraint forbids a token.

        They are normalised before the mask, so a sum over a text is the log-probability of that text.
        """
        raise NotImplementedError

    def best(self, node: int = ROOT) -> int:
        """The token with the largest final score."""
        raise NotImplementedError

    def entropy(self, node: int = ROOT) -> float:
        """Entropy in nats of the model's own distribution after a node, before masks and samplers."""
        raise NotImplementedError

    def add_stage(self, name: str, scores: Tensor) -> None:
        """Append a stage with scores [n, V] that the decoder computed; call it before a token is sampled."""
        raise NotImplementedError

    def dead_end(self, node: int) -> bool:
        """Whether the grammar allows no token after a node."""
        raise NotImplementedError

    def may_follow(self, token: int, node: int) -> bool:
        """Whether the grammar allows a token after a node."""
        raise NotImplementedError

    def allows(self, token: int) -> bool:
        """Whether the constraint allows a token at the end of the text, without its mask. Call it before a commit."""
        raise NotImplementedError


class ChoiceInterface(Protocol):
    """A token chosen from a row, to be committed."""

    token: int
    rows: RowsInterface
    node: int
    origin: str


class RequestInterface(Protocol):
    """To be yielded: the answer comes back from the `yield`."""

    result: Any


class StreamInterface(Protocol):
    """One model, or an early exit, in step with the lane's text."""

    model: Model
    states: Any  # hidden states of committed tokens, if the strategy names `state_layers`
    seen: RowsInterface | None  # the rows returned last
    takes_unread: bool  # whether a tree may have `unread` tokens

    @property
    def room(self) -> int:
        """Tokens that it can read after the text."""
        raise NotImplementedError

    def behind(self) -> int:
        """Committed tokens that it has not read."""
        raise NotImplementedError

    def extend(self, tree: TokenTree | None = None) -> RequestInterface:
        """Request rows for the end of the text and for every node of a draft tree that was not read yet."""
        raise NotImplementedError

    def resume(self, layer: int, states: Tensor) -> RequestInterface:
        """Request logits [n, V] of rows that enter at a layer with these states [n, hidden_size].

        They run through it and all later layers as if they followed the text that was read, each after the one before,
        and are dropped from the KV cache.
        """
        raise NotImplementedError

    def last_cache(self) -> Any:
        """Key and value states of the last layer, of the committed tokens that were read."""
        raise NotImplementedError

    def spellings(self, start: int) -> list[tuple[int, tuple[int, ...]]]:
        """How a draft model with another tokenizer reads the text from a token on."""
        raise NotImplementedError

    def as_read(self, tokens: list[int]) -> list[int]:
        """The text and draft tokens after it, as tokens of this stream's model."""
        raise NotImplementedError

    @property
    def common(self) -> Tensor:
        """Ids of the tokens that the lane and this stream's model have in common: the lane's and its own, [2, n]."""
        raise NotImplementedError
