"""What the tests of autoregressive heads share: the features after a path without a cache, and wrong drafters."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Layer = Callable[[Tensor, Tensor], Tensor]
"""Features [n, width] of the next tokens, of their embeddings and of the features before them, [n, width] each."""


def features_after(run: Layer, known: Tensor, embeddings: Tensor) -> Tensor:
    """The features [width] after the last token: `known` [m, width] of the first tokens, then the head's own.

    Each token is computed in a forward over the whole text.
    """
    features = known
    while len(features) < len(embeddings):
        features = torch.cat([features, run(embeddings[1:len(features) + 1], features)[-1:]])
    return features[-1]


class WithoutRollBack:
    """The head's cache counts the rows of draft tokens as text."""

    def drafted(self, lm, budget):
        tree = yield from super().drafted(lm, budget)
        self._text.cache.length = self._text.cache.rows
        self._text.cache.crop = lambda length: None
        return tree


class WrongPositions:
    """Draft tokens stand one position too early."""

    def grow(self, growing, depth):
        growing._last -= 1
        return super().grow(growing, depth)


