"""Reading a separate text with a stream of its own, piece by piece."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from playground.decoding.requests import Feed, Request, StepsTo
from playground.decoding.stream.forwards import StreamForwards, chunk_of, in_chain
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan

PIECE = 128  # tokens per forward of `reading`, which returns the logits of every row


class Piece(NamedTuple):
    """A piece of a text read by `reading`."""

    tokens: list[int]
    logits: Tensor  # [n, V], after each token
    hidden: Tensor | None = None  # input of the lm_head, [n, hidden_size], if the lane needs hidden states


def reading(stream: StreamForwards, ids: list[int], hidden: bool) -> list[Request]:
    """Requests that read a text with a separate stream, one for each piece."""
    piece = min(PIECE, chunk_of(stream.model))
    return [Request(_read(stream, ids[start:start + piece], hidden)) for start in range(0, len(ids), piece)]


def _read(stream: StreamForwards, tokens: list[int], hidden: bool) -> StepsTo[Piece]:
    model, last = stream.model, frozenset([stream.model.depth] if hidden else [])
    feed = Feed(stream, ForwardInput(stream.store, tokens, in_chain(len(tokens))), LayerPlan(capture=last))
    yield [feed]
    stream.store.commit(len(tokens) - 1)
    last_states = model.normed(feed.captured[model.depth]) if hidden else None
    return Piece(tokens, feed.result()[:, :stream.lane.vocabulary], last_states)
