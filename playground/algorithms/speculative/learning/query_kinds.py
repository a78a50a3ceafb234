"""Kinds of questions, found while they are asked: prompts whose tokens are similar on average are of one kind."""
from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn.functional import normalize

SIMILAR = 0.9  # cosine of a prompt and the mean of a kind from which on it belongs to it


class QueryKinds:
    """Mean embeddings of the prompts of each kind. A visitor's questions are routed by the nearest."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._means: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.counts)

    def route(self, embeddings: Tensor, most: int) -> int:
        """The kind of a prompt with these input embeddings [n, width], which it then belongs to.

        It is the nearest kind, or a new one if none is similar and there are less than `most`.
        """
        vector = normalize(embeddings.float().mean(0), dim=0).cpu()
        found = [float(vector @ normalize(mean, dim=0)) for mean in self._means]
        nearest = max(range(len(found)), key=found.__getitem__, default=None)
        if nearest is None or found[nearest] < SIMILAR and len(found) < most:
            self.counts.append(1)
            self._means.append(vector)
            return len(found)
        self.counts[nearest] += 1
        self._means[nearest] = self._means[nearest].lerp(vector, 1 / self.counts[nearest])
        return nearest

    def digest(self) -> str:
        """Hash of the kinds."""
        content = torch.stack(self._means).numpy().tobytes() if self._means else b""
        return blake2b(content + repr(self.counts).encode(), digest_size=8).hexdigest()
