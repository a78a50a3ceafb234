"""Overlays: what did the model see, weigh and expect in a text that is finished?

An overlay changes nothing. Once the text of a lane is complete, the lane's model reads it again, piece by piece, in a
KV cache that nothing else uses, and the overlays of the lane receive what they read of that. So the text, its
probabilities and its KV cache are those of a lane without overlays, and a lane without overlays pays nothing.

Row t of a reading has read token t and predicts token t + 1. A figure says on which of the two it is painted.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from playground.contract.base import Strategy
from playground.errors import Refusal

if TYPE_CHECKING:
    from torch import Tensor

    from playground.events import Event, Figure, Note


class OverlaidText(NamedTuple):
    """A finished text."""

    tokens: list[int]  # prompt included
    start: int  # length of the prompt in tokens
    piece: Callable[[int], str]  # the text of a token
    ends: frozenset[int] = frozenset()  # tokens that end a text

    @property
    def generated(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.start

    def pieces(self) -> list[str]:
        """The texts of the generated tokens."""
        return [self.piece(token) for token in self.tokens[self.start:]]

    def written(self) -> list[str]:
        """The same, empty for a token that ends the text: its name is no part of what was written."""
        return ["" if token in self.ends else self.piece(token) for token in self.tokens[self.start:]]


class RoutedRows(NamedTuple):
    """What the router of one layer of a mixture of experts did with some rows."""

    logits: Tensor  # [n, experts]
    gates: Tensor  # [n, used], the weights that the outputs of the chosen experts were multiplied with
    chosen: Tensor  # [n, used], indices of experts


class Overlay(Strategy):
    """Reads a finished text and draws it. What it reads is said by the classes below that it derives from."""

    kind = "overlay"
    guarantee = ("reads_only",)

    def begin(self, text: OverlaidText, model: Any) -> None:
        """Before the reading: the text, and the `engine.model.Model` that reads it."""

    def draw(self) -> Iterator[Figure | Note]:
        """After the reading: yield what to show."""
        raise NotImplementedError

    @property
    def reads_hidden(self) -> tuple[str, ...]:
        """None: an overlay asks nothing of the forwards that the text is generated with."""
        return ()


class WatchesBeams(Overlay):
    """Receives the events of a lane of one of these decoders as they happen, before the reading."""

    decoders: ClassVar[tuple[str, ...]] = ()  # names

    def watch(self, event: Event) -> None:
        """Something happened in the lane."""
        raise NotImplementedError


class ReadsLogits(Overlay):
    """Reads the model's own distributions, before masks and samplers."""

    def read_logits(self, first: int, logits: Tensor) -> None:
        """Logits [n, V] of the rows from position `first` on."""
        raise NotImplementedError


class ReadsLoadedWeights(Overlay):
    """Reads the model's own distributions, and beside them those of the loaded weights where a lane has others. Costs
    forwards of the loaded weights there.
    """

    def read_both(self, first: int, logits: Tensor, loaded: Tensor) -> None:
        """Logits [n, V] of the rows from position `first` on, of the lane's weights and of the loaded ones.

        They are the same tensor in a lane that has the loaded weights.
        """
        raise NotImplementedError


class ReadsStates(Overlay):
    """Reads hidden states between layers."""

    def layers(self, depth: int) -> tuple[int, ...]:
        """Layers whose inputs it reads, of a model with `depth` layers; the depth means after the last one."""
        return tuple(range(depth + 1))

    def read_states(self, first: int, states: dict[int, Tensor]) -> None:
        """By layer, the hidden states [n, hidden_size] of the rows from position `first` on, before the final norm."""
        raise NotImplementedError


class ReadsHeads(Overlay):
    """Reads the attention weights of every head."""

    def read_heads(self, layer: int, first: int, weights: Tensor) -> None:
        """Attention weights [heads, n, slots] of the rows from position `first` on in one decoder layer.

        Slot s holds token s; those after a row have weight 0.
        """
        raise NotImplementedError

    def check_target(self, model: Any) -> None:
        if not model.attends:
            raise Refusal(
                f"The attention of {model.name} runs inside the transformers library, which does not show it: remove "
                f"{self.title}, or choose another model.",
                self.name,
            )
        if model.recurrence and not model.recurrence.cache_layers:
            raise Refusal(
                f"{model.name} has no attention, which {self.title} reads: remove it, or choose another model.",
                self.name,
            )


class ReadsSource(Overlay):
    """Reads how the decoder of an encoder-decoder model reads its source, the prompt."""

    needs = ("encoder",)

    def read_source(self, layer: int, weights: Tensor) -> None:
        """Weights [heads, rows, source] of one decoder layer, the rows of a whole text from the start of the answer on.

        A row predicts the token after it; its weights over the source sum to 1.
        """
        raise NotImplementedError

    def check_target(self, model: Any) -> None:
        if not model.has_encoder:
            raise Refusal(
                f"{self.title} shows how a decoder reads what an encoder has read, and {model.name} has no encoder: "
                "choose an encoder-decoder model, such as a T5.",
                self.name,
            )


class ReadsExperts(Overlay):
    """Reads what the routers of a mixture of experts choose."""

    needs = ("experts",)

    def read_experts(self, number: int, first: int, rows: RoutedRows) -> None:
        """What the router with this number, from 0, did with the rows from position `first` on."""
        raise NotImplementedError

    def check_target(self, model: Any) -> None:
        if not model.experts:
            raise Refusal(
                f"{self.title} draws which experts ran, and {model.name} has none whose choice can be read: choose a "
                "mixture of experts, such as Pocket experts.",
                self.name,
            )


class ReadsChannels(Overlay):
    """Reads the feed-forward networks: what each channel, a neuron, has before the output projection."""

    def read_channels(self, layer: int, first: int, channels: Tensor) -> None:
        """Channels [n, k] of a layer for the rows from position `first` on."""
        raise NotImplementedError

    def check_target(self, model: Any) -> None:
        if model.parts is None:
            raise Refusal(
                f"{self.title} reads inside of feed-forward networks, which works for llama, mistral, qwen2 and qwen3 "
                f"models that are not quantised: remove it, or choose another model than {model.name}.",
                self.name,
            )


class ReadsAnotherText(ReadsLogits):
    """Reads another continuation of the prompt in place of the lane's text, in a reading of its own."""

    def continuation(self, text: OverlaidText, model: Any) -> list[int]:
        """The tokens to read after the prompt. `text` is the lane's, of which `begin` gets a copy with these tokens."""
        raise NotImplementedError


class LooksAhead(ReadsLogits):
    """Reads, too, what would follow some tokens at each position. Costs rows of their own."""

    def candidates(self, first: int, logits: Tensor) -> list[list[int]]:
        """For each of these rows, the tokens that might follow, whose next distributions it wants to read."""
        raise NotImplementedError

    def read_ahead(self, first: int, logits: list[Tensor]) -> None:
        """For each row from position `first` on, the logits [candidates, V] after each of its candidates."""
        raise NotImplementedError
