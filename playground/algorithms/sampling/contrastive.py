"""A row held against a weaker one, among tokens that are plausible by the better row alone.

The difference of two log-probabilities is largest where the weaker row finds a token all but impossible, whatever the
better one thinks of it. So only tokens that the better row finds plausible compete.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from playground.events import Event, Figure, Note

if TYPE_CHECKING:
    from torch import Tensor

TIE = 1e-6  # of the row's own log-probability: where nothing differs, the likelier token wins and not the lower id
# nats that implausible tokens lie below: never drawn, but a grammar may leave no other, and then the row itself decides
FAR = 1e4
SHOWN = 5  # candidates


def plausible(logits: Tensor, share: float) -> Tensor:
    """Tokens at least `share` times as probable as the best of their row, [n, V]; at 1 the best alone, at 0 all."""
    least = math.log(share) if share > 0 else -math.inf
    return logits >= logits.amax(-1, keepdim=True) + least


def among(scores: Tensor, logits: Tensor, share: float) -> Tensor:
    """The scores [n, V] of plausible tokens; elsewhere the row itself, far below them."""
    own = logits.log_softmax(-1)
    return torch.where(plausible(logits, share), scores + TIE * own, own - FAR)


def told(
    better: Tensor, weaker: Tensor, scores: Tensor, share: float, position: int, piece: Callable[[int], str]
) -> Iterator[Event]:
    """Events about one place of the text: how many tokens competed, the best of them, and whether the contrast turned
    the choice. Rows are [V].
    """
    logp, loga = better.log_softmax(-1), weaker.log_softmax(-1)
    competing = int(plausible(better, share).sum())
    yield Figure("scalar", "plausible tokens", {"x": position, "series": {"tokens": competing}})
    best = scores.topk(min(SHOWN, competing)).indices
    values = torch.stack([logp[best], loga[best], scores[best]], 1)
    yield Figure(
        "matrix",
        "candidates",
        {
            "rows": [piece(token) for token in best.tolist()],
            "columns": ["ln p", "ln weaker", "score"],
            "values": values.tolist(),
        },
    )
    first, chosen = int(logp.argmax()), int(scores.argmax())
    if first != chosen:
        yield Note(f"The contrast puts {piece(chosen)!r} before {piece(first)!r}: the weaker row gives them "
                   f"{float(loga[chosen].exp()):.2g} and {float(loga[first].exp()):.2g}.")
