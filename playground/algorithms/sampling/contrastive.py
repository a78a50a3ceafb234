"""Contrastive scores with a plausibility constraint.

The difference of two log-probabilities is largest for tokens that are nearly impossible for the weaker model, however
improbable they are for the better one. So it is restricted to tokens that are plausible for the better model.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from playground.engine.host_copies import read_lists
from playground.engine.sampling import first_largest, largest
from playground.events import Event, Figure, Note

if TYPE_CHECKING:
    from torch import Tensor

TIE = 1e-6  # weight of the better log-probability, which breaks ties
# nats by which implausible tokens are lowered: only sampled if a grammar allows no others
FAR = 1e4
SHOWN = 5  # candidates


def plausible(logits: Tensor, share: float) -> Tensor:
    """Mask [n, V] of tokens at least `share` times as probable as the best of their row; 1: the best alone, 0: all."""
    least = math.log(share) if share > 0 else -math.inf
    return logits >= logits.amax(-1, keepdim=True) + least


def restricted(scores: Tensor, logits: Tensor, share: float) -> Tensor:
    """The scores [n, V] of plausible tokens; for the others their log-probability, FAR below."""
    own = logits.log_softmax(-1)
    return torch.where(plausible(logits, share), scores + TIE * own, own - FAR)


def contrast_events(
    better: Tensor, weaker: Tensor, scores: Tensor, share: float, position: int, piece: Callable[[int], str]
) -> Iterator[Event]:
    """Events about one position: the number of plausible tokens, the best of them, and whether the contrast changed the
    choice.

    `better` and `weaker` are logits [V], `scores` the contrastive scores [V].
    """
    logp, loga = better.log_softmax(-1), weaker.log_softmax(-1)
    best = largest(scores, min(SHOWN, len(scores))).indices
    values = torch.stack([logp[best], loga[best], scores[best]], 1)
    ranked = torch.cat([first_largest(logp), first_largest(scores)])
    count, best, values, (first, chosen), (of_first, of_chosen) = read_lists(
        plausible(better, share).sum(), best, values, ranked, loga[ranked].exp()
    )
    yield Figure("scalar", "plausible tokens", {"x": position, "series": {"tokens": count}})
    labels = {"rows": list(map(piece, best[:count])), "columns": ["ln p", "ln weaker", "score"]}
    yield Figure("matrix", "candidates", {**labels, "values": values[:count]})
    if first != chosen:
        yield Note(
            f"The contrast ranks {piece(chosen)!r} above {piece(first)!r}: the weaker model gives them "
            f"{of_chosen:.2g} and {of_first:.2g}."
        )
