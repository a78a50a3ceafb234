"""Chance, in one place. Every draw is keyed by what it decides, so a run repeats whatever the order of its forwards.

Two lanes with one seed share their draws: the uniform behind the token at a position is the same in both. A test may
put another object in this one's place and enumerate what every draw could have been.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

SCALE = 2.0 ** -53


class Draws:
    """Uniform numbers in [0, 1) from a seed and a key: purpose, lineage, position, and how often that key was asked
    before.

    The lineage tells sequences that grow side by side from each other, so that one more of them changes nothing for the
    rest.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._asked: Counter = Counter()

    def uniform(self, purpose: str, position: int, lineage: int = 0) -> float:
        count = self._asked[purpose, position, lineage]
        self._asked[purpose, position, lineage] += 1
        return self._uniform(purpose, position, lineage, count)

    def _uniform(self, purpose: str, position: int, lineage: int, count: int = 0) -> float:
        key = f"{self.seed}|{purpose}|{position}|{count}{f'|{lineage}' if lineage else ''}".encode()
        return (int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 11) * SCALE

    def flip(self, probability: float, purpose: str, position: int, lineage: int = 0) -> tuple[bool, float]:
        """True with the given probability, and the uniform that decided."""
        u = self.uniform(purpose, position, lineage)
        return u < probability, u

    def coin(self, probability: float, purpose: str, history: Sequence[int], lineage: int = 0) -> bool:
        """True with the given probability, the same however often it is asked for one history.

        The uniform depends on the length of the history alone, so lanes with one seed share it even where their texts
        differ.
        """
        return self._uniform(purpose, len(history), lineage) < probability

    def pick(self, p: Tensor, purpose: str, position: int, lineage: int = 0) -> int:
        """An index drawn from the distribution p [V], in order of ids."""
        # Apple GPUs have no float64
        cumulated = p.cumsum(0, dtype=torch.float32 if p.device.type == "mps" else torch.float64)
        target = self.uniform(purpose, position, lineage) * float(cumulated[-1])
        index = int(torch.searchsorted(cumulated, target, right=True))
        return index if index < len(p) else int(p.nonzero()[-1])  # rounding may carry the largest uniforms past the end
