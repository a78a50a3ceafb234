"""What a lane hands to a strategy: sequences, rows, choices, streams and requests, as protocols.

`playground.decoding` implements them; `playground.contract.lane` describes the lane itself. A strategy reads them,
hands them back to the lane and changes none of them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from playground.contract.token_tree import ROOT

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract.base import Strategy
    from playground.contract.early_exit import EarlyExit
    from playground.contract.token_tree import TokenTree
    from playground.engine.model import Model


Drawn = Sequence[Sequence[tuple[int, float | None]]]
"""Tokens [n, k] that were drawn from n distributions, each with its probability if that was read with it."""


class ChainInterface(Protocol):
    """The mask and samplers of one sequence."""

    @property
    def samplers(self) -> Sequence[Strategy]:
        """In the order they are applied."""

    @property
    def constraint(self) -> Strategy | None:
        """What the mask follows from, if there is one."""

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled; argmax otherwise."""

    @property
    def reads_text(self) -> bool:
        """Whether a mask or a sampler reads the tokens before a row."""


class SequenceInterface(Protocol):
    """One growing text of a lane."""

    @property
    def number(self) -> int:
        """0 is the lane's own text; forks are numbered from 1."""

    @property
    def tokens(self) -> list[int]:
        """Everything committed, prompt included."""

    @property
    def text(self) -> str:
        """The generated text, without an incomplete last character."""

    @property
    def logprobs(self) -> list[float | None]:
        """Log-probabilities of the tokens after the prompt."""

    @property
    def reason(self) -> str | None:
        """Why it ended; None while it grows."""

    @property
    def lineage(self) -> int:
        """Key of its random numbers."""

    @property
    def written(self) -> list[int]:
        """Tokens after the prompt."""

    @property
    def generated(self) -> int:
        """Number of tokens after the prompt."""

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""


class MaskedRowsInterface(Protocol):
    """Logits after the committed text (the root, node -1) and after nodes of a draft tree, and what the grammar allows.

    Row i of the tensors belongs to tree node `first` + i.
    """

    @property
    def raw(self) -> Tensor:
        """Logits, [n, V]."""

    @property
    def masks(self) -> Tensor | None:
        """Tokens that the constraint allows, bool [n, V]; None without one."""

    @property
    def tree(self) -> TokenTree:
        """The draft tree."""

    @property
    def first(self) -> int:
        """The node of the first row."""

    @property
    def length(self) -> int:
        """Tokens up to the root."""

    @property
    def sequence(self) -> SequenceInterface:
        """The text that they follow."""

    @property
    def chain(self) -> ChainInterface:
        """Its mask and samplers."""

    @property
    def committed(self) -> list[int]:
        """Tokens up to the root, prompt included."""

    def row(self, node: int) -> int:
        """Index of the row of a node. Raises IndexError if the node was not part of this forward."""

    def unread(self, node: int) -> bool:
        """Whether a node was added to the tree after this forward."""

    def position(self, node: int) -> int:
        """Position in the sequence of the token that follows a node."""

    def dead_end(self, node: int) -> bool:
        """Whether the grammar allows no token after a node."""

    def may_follow(self, token: int, node: int) -> bool:
        """Whether the grammar allows a token after a node."""

    def allows(self, token: int) -> bool:
        """Whether the constraint allows a token at the end of the text, without its mask. Call it before a commit."""


class RowsInterface(MaskedRowsInterface, Protocol):
    """These rows, what samplers make of them, and results from them."""

    @property
    def others(self) -> Mapping[str | EarlyExit, Tensor]:
        """Logits [n, V] of other streams and early exits that were declared."""

    @property
    def probes(self) -> Tensor | None:
        """Logits [n, V] of the tree's probes, in order; None if this forward had none."""

    @property
    def hidden(self) -> Tensor | None:
        """Input of the lm_head, [n, hidden_size]; None if no strategy of the lane needs hidden states."""

    @property
    def scores(self) -> Tensor:
        """Scores after masks and samplers, [n, V]."""

    @property
    def p(self) -> Tensor:
        """Distributions that tokens are sampled from, [n, V]; one-hot if no sampler draws."""

    @property
    def logp(self) -> Tensor:
        """The model's own log-probabilities, before masks and samplers, [n, V]."""

    def scores_of(self, nodes: list[int]) -> Tensor:
        """The scores [n, V] after nodes."""

    def distribution(self, node: int = ROOT) -> Tensor:
        """The row of `p` after one node, [V]; cheaper than all of `p` for a large tree."""

    def allowed_logp(self, node: int = ROOT) -> Tensor:
        """Log-probabilities after samplers, [V], of what may follow a node: -inf where the constraint forbids a token.

        They are normalised before the mask, so a sum over a text is the log-probability of that text.
        """

    def best(self, node: int = ROOT) -> int:
        """The token with the largest final score."""

    def entropy(self, node: int = ROOT) -> float:
        """Entropy in nats of the model's own distribution after a node, before masks and samplers."""

    def add_stage(self, name: str, scores: Tensor) -> None:
        """Append a stage with scores [n, V] that the decoder computed; call it before a token is sampled."""


class ChoiceInterface(Protocol):
    """A token chosen from a row, to be committed."""

    @property
    def token(self) -> int: ...

    @property
    def rows(self) -> RowsInterface: ...

    @property
    def node(self) -> int:
        """The node after which it was chosen."""

    @property
    def origin(self) -> str:
        """How it came about, as in a Commit event."""


class RequestInterface(Protocol):
    """To be yielded: the answer comes back from the `yield`."""

    @property
    def result(self) -> Any:
        """The answer, once it was served."""


class ExitInterface(Protocol):
    """An early exit of the target: its lm_head on an inner layer."""

    @property
    def layer(self) -> int:
        """Layers that its rows have passed."""

    @property
    def hidden(self) -> Tensor | None:
        """States after these layers, [n, hidden_size], of the rows read last; None before the first."""

    @property
    def inputs(self) -> dict[int, Tensor]:
        """Of the same rows, the inputs of earlier layers whose states are kept."""

    def extend(self, tree: TokenTree | None = None) -> RequestInterface:
        """Request rows for the end of the text and for every node of a draft tree that was not read yet."""


class StreamInterface(Protocol):
    """One model in step with the lane's text."""

    @property
    def model(self) -> Model: ...

    @property
    def states(self) -> Any:
        """Hidden states of committed tokens, if the strategy names `state_layers`."""

    @property
    def seen(self) -> RowsInterface | None:
        """The rows returned last."""

    @property
    def takes_unread(self) -> bool:
        """Whether a tree may have `unread` tokens."""

    @property
    def room(self) -> int:
        """Tokens that it can read after the text."""

    def behind(self) -> int:
        """Committed tokens that it has not read."""

    def extend(self, tree: TokenTree | None = None) -> RequestInterface:
        """Request rows for the end of the text and for every node of a draft tree that was not read yet."""

    def resume(self, layer: int, states: Tensor) -> RequestInterface:
        """Request logits [n, V] of rows that enter at a layer with these states [n, hidden_size].

        They run through it and all later layers as if they followed the text that was read, each after the one before,
        and are dropped from the KV cache.
        """

    def last_cache(self) -> Any:
        """Key and value states of the last layer, of the committed tokens that were read."""

    def spellings(self, start: int) -> list[tuple[int, tuple[int, ...]]]:
        """How a draft model with another tokenizer reads the text from a token on."""

    def as_read(self, tokens: list[int]) -> list[int]:
        """The text and draft tokens after it, as tokens of this stream's model."""

    @property
    def common(self) -> Tensor:
        """Ids of the tokens that the lane and this stream's model have in common: the lane's and its own, [2, n]."""
