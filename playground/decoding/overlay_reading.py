"""Reads a finished text once more, in a KV cache of its own, for the overlays of a lane.

These forwards are never batched with others, and the text is complete, so they change neither what this lane wrote nor
what other lanes write. They are recorded as forwards of the stream "overlay".
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from playground.contract import (
    LayerChoices,
    LooksAhead,
    ReadsChannels,
    ReadsExperts,
    ReadsHeads,
    ReadsLoadedWeights,
    ReadsSource,
    ReadsStates,
)
from playground.contract.overlay import OverlaidText, Overlay, ReadsAnotherText, ReadsLogits, RoutedRows
from playground.decoding.requests import Feed, Request, Steps, StepsTo
from playground.decoding.stream import chunk_of
from playground.decoding.stream.forwards import in_chain
from playground.engine.expert_routing import ExpertRouting
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.layer_choices import ComputePass, SharedFeedForward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from playground.contract.lane import Lane
    from playground.engine.layer_choices import FeedForwardPart, NetworkParts
    from playground.engine.model import Model

Reader = TypeVar("Reader", bound=Overlay)
PIECE = 128  # most tokens per forward
WEIGHTS = 2 ** 17  # most attention weights of one head per forward


def reading_of(lane: Lane, model: Model, overlays: Sequence[Overlay], loaded: Model | None = None) -> Request | None:
    """The request that lets overlays read the lane's text and draw it; None without overlays.

    loaded: the model with its loaded weights, if the lane's `model` has others.
    """
    return Request(_readings(lane, model, overlays, loaded)) if overlays else None


def _readings(lane: Lane, model: Model, overlays: Sequence[Overlay], loaded: Model | None) -> Steps:
    """One reading of the lane's text, and one of every other text that an overlay wants to read."""
    apart: list[Overlay] = [overlay for overlay in overlays if isinstance(overlay, ReadsAnotherText)]
    groups = [[overlay for overlay in overlays if overlay not in apart], *([overlay] for overlay in apart)]
    for group in filter(None, groups):
        yield from OverlayReading(lane, model, group, loaded).steps()


@dataclass
class NotedRouting(ExpertRouting):
    """The routers' own choice, with their logits and gates."""

    routed: list[RoutedRows] = field(default_factory=list)

    def choose(self, router: nn.Module, logits: Tensor, gates: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        self.routed.append(RoutedRows(logits, gates, indices))
        return super().choose(router, logits, gates, indices)


class WatchedChannels(LayerChoices):
    """Runs every layer whole, and passes on the channels of its feed-forward network."""

    def __init__(self, parts: NetworkParts, readers: list[ReadsChannels], first: int):
        self._parts, self._readers, self._first = parts, readers, first

    def feed_forwards(self, layer: int, hidden: Tensor, full: FeedForwardPart) -> Sequence[SharedFeedForward]:
        channels = full.activations(self._parts.ffn_input(layer, hidden))
        for reader in self._readers:
            reader.read_channels(layer, self._first, channels)
        return [SharedFeedForward(None, full)]


class OverlayReading:
    """One reading of the text of a lane, for all of its overlays."""

    name, reads_again, captures = "overlay", True, frozenset[int]()

    def __init__(self, lane: Lane, model: Model, overlays: Sequence[Overlay], loaded: Model | None = None):
        self.model, self._lane, self._overlays = model, lane, overlays
        self.prompt: list[int] = []
        self._first = 0  # position of the first row of the running forward
        self._store = model.new_store()
        self._loaded: OverlayReading | None = None
        if loaded is not None and loaded is not model and self._of(ReadsLoadedWeights):
            self._loaded = OverlayReading(lane, loaded, ())

    def steps(self) -> Steps:
        """The forwards over the text, then what the overlays draw, which the lane records."""
        text, lane = self._text(), self._lane
        for overlay in self._overlays:
            overlay.begin(text, self.model)
        if self._of(ReadsHeads):
            self._store.on_query_heads = self._read_heads
        self._store.on_cross_attention = self._read_source if self._of(ReadsSource) else None
        size = _piece_size(self.model, len(text.tokens))
        for first in range(0, len(text.tokens), size):
            yield from self._read(first, text.tokens[first:first + size])
        for reading in filter(None, (self, self._loaded)):
            reading._store.done = True
        for overlay in self._overlays:
            for event in overlay.draw():
                lane.record(event)

    def _text(self) -> OverlaidText:
        lane = self._lane
        text = OverlaidText(list(lane.tokens), len(lane.tokens) - lane.generated, lane.piece, lane.end_ids)
        for other in self._of(ReadsAnotherText):
            text = text._replace(tokens=[*text.tokens[:text.start], *other.continuation(text, self.model)])
        return text

    def _of(self, kind: type[Reader]) -> list[Reader]:
        """The overlays that read something of this kind."""
        return [overlay for overlay in self._overlays if isinstance(overlay, kind)]

    def _read(self, first: int, tokens: list[int]) -> Steps:
        """One forward over a piece of the text, and one over what might follow each of its tokens."""
        self._first = first
        work = ForwardInput(self._store, tokens, in_chain(len(tokens)))
        work.watch = (lambda position: True) if self._of(ReadsHeads) else None
        feed = self._feed(work, self._plan())
        yield [feed]
        logits = feed.result()[:, :self._lane.vocabulary]
        self._pass_on(feed, logits)
        for overlay in self._of(LooksAhead):
            yield from self._look_ahead(overlay, logits)
        self._store.commit(len(tokens) - 1)
        if comparing := self._of(ReadsLoadedWeights):
            loaded = (yield from self._loaded.logits(tokens)) if self._loaded else logits
            for of_both in comparing:
                of_both.read_both(first, logits, loaded)

    def logits(self, tokens: list[int]) -> StepsTo[Tensor]:
        """The logits [n, V] after the next tokens of the text, which no overlay reads here."""
        feed = self._feed(ForwardInput(self._store, tokens, in_chain(len(tokens))), LayerPlan())
        yield [feed]
        self._store.commit(len(tokens) - 1)
        return feed.result()[:, :self._lane.vocabulary]

    def _feed(self, work: ForwardInput, plan: LayerPlan) -> Feed:
        feed = Feed(self, work, plan)
        feed.batch = id(feed)  # alone, so that rows of other lanes are rounded as they would be without it
        return feed

    def _plan(self) -> LayerPlan:
        layers = {layer for overlay in self._of(ReadsStates) for layer in overlay.layers(self.model.depth)}
        channels, first, parts = self._of(ReadsChannels), self._first, self.model.parts
        choices = (lambda positions: WatchedChannels(parts, channels, first)) if channels and parts else None
        return LayerPlan(
            capture=frozenset(layers),
            compute=ComputePass(choices) if choices else None,
            routing=NotedRouting() if self._of(ReadsExperts) else None,
        )

    def _pass_on(self, feed: Feed, logits: Tensor) -> None:
        """Let the overlays read what a forward returned."""
        for of_logits in self._of(ReadsLogits):
            of_logits.read_logits(self._first, logits)
        for of_states in self._of(ReadsStates):
            layers = of_states.layers(self.model.depth)
            of_states.read_states(self._first, {layer: feed.captured[layer] for layer in layers})
        routing = feed.plan.routing
        for number, rows in enumerate(routing.routed if isinstance(routing, NotedRouting) else ()):
            for of_experts in self._of(ReadsExperts):
                of_experts.read_experts(number, self._first, rows)

    def _read_heads(self, layer: int, weights: Tensor, positions: list[int]) -> None:
        """Attention weights [kv_heads, group, n, slots] of a layer, as the KV cache reports them."""
        recurrence = self.model.recurrence
        decoder_layer = list(recurrence.cache_layers)[layer] if recurrence else layer
        for overlay in self._of(ReadsHeads):
            overlay.read_heads(decoder_layer, positions[0], weights.flatten(0, 1))

    def _read_source(self, layer: int, weights: Tensor) -> None:
        for overlay in self._of(ReadsSource):
            overlay.read_source(layer, weights)

    def _look_ahead(self, overlay: LooksAhead, logits: Tensor) -> Steps:
        """A forward over candidates for the token after each row, which leave the KV cache afterwards."""
        wanted, scratch = overlay.candidates(self._first, logits), len(self._store.parents)
        tokens = [token for row in wanted for token in row]
        parents = [row for row, candidates in enumerate(wanted) for _ in candidates]
        ahead = []
        for part in range(0, len(tokens), PIECE):
            feed = self._feed(
                ForwardInput(self._store, tokens[part:part + PIECE], parents[part:part + PIECE]), LayerPlan()
            )
            yield [feed]
            ahead += list(feed.result()[:, :self._lane.vocabulary])
            self._store.crop_scratch(scratch)
        every = torch.stack(ahead) if ahead else logits[:0]
        overlay.read_ahead(self._first, list(every.split(list(map(len, wanted)))))


def _piece_size(model: Model, length: int) -> int:
    """Tokens per forward: few of a long text, since the attention weights of each with all tokens are held. All of a
    text that begins with a source.
    """
    if model.has_encoder:
        return length
    return max(1, min(PIECE, chunk_of(model), WEIGHTS // max(1, length)))
