"""What of each decoder layer runs in one forward, where that is decided while the forward runs.

A layer is an attention block and a feed-forward network (FFN). Both add to the hidden states, so leaving one out means
adding nothing. A compute policy makes one `LayerChoices` for every forward. The network asks it layer by layer, and
notes what ran in a `ComputePass`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor


class FeedForwardPart(Protocol):
    """A feed-forward network, or a part of one: hidden states [m, d] after the norm in, [m, d] out."""

    @property
    def weights(self) -> int:
        """Numbers in its matrices."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """What it adds to the hidden states."""

    def activations(self, hidden: Tensor) -> Tensor:
        """Its channels, [m, k]: the input of its output projection."""


class NetworkParts(Protocol):
    """The network whose layers a compute policy selects from."""

    @property
    def depth(self) -> int:
        """Decoder layers."""

    @property
    def width(self) -> int:
        """Of the hidden states."""

    @property
    def heads(self) -> int:
        """Query heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    def channels(self, layer: int) -> int:
        """Width of the feed-forward network of a layer, between its projections."""

    def output_norms(self, layer: int) -> Tensor:
        """Norm of the output weights of each channel, [k]."""

    def narrowed(self, layer: int, channels: Tensor) -> FeedForwardPart:
        """The feed-forward network of a layer with only these channels [k]."""

    def ffn_projections(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of a layer's feed-forward network, gate, up [k, d] and down [d, k]; Refusal if it has biases."""

    def ffn_input(self, layer: int, hidden: Tensor) -> Tensor:
        """What the feed-forward network of a layer reads of the hidden states [n, d] after attention: their norm."""

    def feed_forward(self, layer: int, gate: Tensor, up: Tensor, down: Tensor) -> FeedForwardPart:
        """Another feed-forward network for the hidden states of a layer, from weights [k, d], [k, d] and [d, k]."""

    def norm_before(self, layer: int) -> tuple[Tensor, float]:
        """Weight [d] and epsilon of the RMS norm before the feed-forward network of a layer; the depth means before
        the lm_head.
        """

    @property
    def lm_head(self) -> Tensor:
        """Weights of the lm_head, [V, d]."""


class SharedFeedForward(NamedTuple):
    """Rows of a forward and the feed-forward network they run; None means all rows."""

    rows: list[int] | None
    part: FeedForwardPart


class LayerChoices:
    """What runs in each layer of one forward; this base class runs everything."""

    def attends(self, layer: int, hidden: Tensor) -> bool | list[int]:
        """Whether the attention of a layer runs on its input [n, d], or the rows for which it does, ascending.

        The other rows leave the layer no keys and values, and no row sees them there.
        """
        return True

    def stores(self, layer: int, hidden: Tensor) -> bool:
        """Whether rows whose attention does not run still leave keys and values, computed from their states [n, d].

        Then `attended` is not called.
        """
        return False

    def reads_attention(self, layer: int) -> bool:
        """Whether `attended` is called after the attention of a layer."""
        return False

    def attended(self, layer: int, weights: Tensor) -> None:
        """Receive the attention weights of the rows that ran, averaged over heads, [rows, slots].

        The last slots are the rows of this forward.
        """

    def mixed(self, layer: int, heads: Tensor) -> Tensor:
        """The outputs of all query heads of the rows that ran, [n, heads * head_dim], before the output projection."""
        return heads

    def feed_forwards(self, layer: int, hidden: Tensor, full: FeedForwardPart) -> Sequence[SharedFeedForward]:
        """The feed-forward networks to run on the hidden states [n, d] after attention.

        A row that no entry names runs none. `full` is the layer's own.
        """
        return [SharedFeedForward(None, full)]

    def deciding_weights(self, layer: int) -> int:
        """Weights that each row was multiplied with to decide what of a layer runs; they count as computed."""
        return 0

    def observe(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Receive the hidden states [n, d] of all rows before and after the feed-forward networks of a layer."""


class LayerSteps:
    """What a training changes in a forward with gradients (`training.stepped_llama`); this base class changes
    nothing. Hidden states are [texts, n, d].
    """

    reads_attention = False  # whether `attended` is called

    def layer(self, layer: int, hidden: Tensor, run: Callable[..., Tensor]) -> Tensor:
        """The hidden states after a layer, which is `run(hidden, visible=None)`.

        Tokens that are not `visible`, bool [texts, n], are seen by none but themselves.
        """
        return run(hidden)

    def feed_forward(self, layer: int, normed: Tensor, own: Callable[[Tensor], Tensor]) -> Tensor:
        """What the feed-forward network of a layer adds; `own` is the layer's, over the normed states."""
        return own(normed)

    def attended(self, layer: int, weights: Tensor, seen: Tensor) -> None:
        """Receive a layer's attention weights, averaged over heads, and which keys each query sees, [texts, n, n]."""


@dataclass
class ComputePass:
    """The choices for one forward, and what ran. `start` makes the choices for rows at these true positions."""

    start: Callable[[list[int]], LayerChoices]
    choices: LayerChoices = field(default_factory=LayerChoices)
    ran: list[list[float]] = field(default_factory=list)  # share of a layer's weights that each row ran, by layer
    idle_weights: float = 0.0  # weights that were not multiplied, summed over layers and rows
    idle_attention: float = 0.0  # layers whose attention did not run, in part if it ran for some rows

    def begin(self, positions: list[int]) -> None:
        """Before a forward, or before it is repeated."""
        self.choices, self.ran, self.idle_weights, self.idle_attention = self.start(positions), [], 0.0, 0.0

    def note(self, weights: int, spent: list[float]) -> None:
        """A layer of so many weights has run; `spent` is how many each row was multiplied with."""
        self.ran.append([each / weights for each in spent])
        self.idle_weights += weights * len(spent) - sum(spent)

    @property
    def layers(self) -> int:
        """Layers of which some part ran for some row."""
        return sum(any(shares) for shares in self.ran)


def attending_rows(attends: bool | list[int], count: int) -> list[int]:
    """The rows of a forward for which attention runs, from what `LayerChoices.attends` returned."""
    return attends if isinstance(attends, list) else list(range(count)) if attends else []
