"""The random numbers of a run. Every draw is keyed by its purpose, so runs repeat whatever the order of forwards.

Lanes with the same seed share their draws: the uniform number for the token at a position is the same. Tests replace
`Draws` to enumerate every possible outcome.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor

from playground.engine.host_copies import on_device, read_lists

SCALE = 2.0 ** -53


class Remaining(Protocol):
    """Tokens that are sampled without replacement (`algorithms.speculative.without_replacement`)."""

    def take_at(self, u: float) -> int:
        """Sample with a uniform number in [0, 1) and remove the token."""


class Draws:
    """Uniform numbers in [0, 1), hashed from a seed and a key: purpose, lineage, position, and number of earlier uses.

    The lineage identifies one of several parallel sequences, so that adding a sequence does not change the others.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._uses: Counter = Counter()

    def uniform(self, purpose: str, position: int, lineage: int = 0) -> float:
        count = self._uses[purpose, position, lineage]
        self._uses[purpose, position, lineage] += 1
        return self._uniform(purpose, position, lineage, count)

    def peek(self, purpose: str, position: int, lineage: int = 0) -> float:
        """What `uniform` will return next for this key."""
        return self._uniform(purpose, position, lineage, self._uses[purpose, position, lineage])

    def _uniform(self, purpose: str, position: int, lineage: int, count: int = 0) -> float:
        key = f"{self.seed}|{purpose}|{position}|{count}{f'|{lineage}' if lineage else ''}".encode()
        return (int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 11) * SCALE

    def undo(self, keys: list[tuple[str, int]]) -> None:
        """Take draws back, by purpose and position: their numbers are the next ones."""
        for purpose, position in keys:
            self._uses[purpose, position, 0] -= 1

    def flip(self, probability: float, purpose: str, position: int, lineage: int = 0) -> tuple[bool, float]:
        """True with the given probability, and the uniform number that decided."""
        u = self.uniform(purpose, position, lineage)
        return u < probability, u

    def coin(self, probability: float, purpose: str, history: Sequence[int], lineage: int = 0) -> bool:
        """True with the given probability, always the same for one history.

        The uniform depends on the length of the history alone, so lanes with one seed share it even where their texts
        differ.
        """
        return self._uniform(purpose, len(history), lineage) < probability

    def pick(self, p: Tensor, purpose: str, position: int, lineage: int = 0) -> int:
        """Sample an index from a distribution p [V] by inverting its cumulative sum."""
        return within(int(self.index(p, purpose, position, lineage)), p)

    def index(self, p: Tensor, purpose: str, position: int, lineage: int = 0) -> Tensor:
        """The index that `pick` samples, [1] on the device of p; V where rounding exceeded the sum (`within`)."""
        cumulated = cumulate(p)
        target = self.uniform(purpose, position, lineage) * cumulated[-1:]  # not read: a GPU would run empty meanwhile
        return torch.searchsorted(cumulated, target, right=True)

    def pick_each(self, p: Tensor, keys: list[list[tuple[str, int]]]) -> list[list[tuple[int, float]]]:
        """`pick` from distributions [n, V], and the probability of each index, read in one transfer: [n, k] for k keys
        (purpose, position) of each distribution.
        """
        drawn = self.indices(p, keys)
        return [list(zip(*own)) for own in zip(*read_lists(drawn, p.gather(1, drawn)))]

    def indices(
        self, p: Tensor, keys: list[list[tuple]], number: Callable[[str, int, int], float] | None = None
    ) -> Tensor:
        """The indices [n, k] that `pick` samples from distributions [n, V], on their device.

        `number` says the uniform number of a key; the next one by default.
        """
        cumulated, number = cumulate(p), number or self.uniform
        u = on_device([[number(*key) for key in row] for row in keys], p.device, cumulated.dtype)
        drawn = torch.searchsorted(cumulated, u * cumulated[:, -1:], right=True)
        last = ((p > 0) * torch.arange(p.shape[1], device=p.device)).amax(1, keepdim=True)  # as `within`
        return torch.where(drawn < p.shape[1], drawn, last)

    def take(self, remaining: Remaining, purpose: str, position: int) -> int:
        """Sample a token that was not taken before, and take it. The same token that `pick` would choose."""
        return remaining.take_at(self.uniform(purpose, position))


def within(index: int, p: Tensor) -> int:
    """An index of p [V]; the last possible one where rounding exceeded the sum."""
    return index if index < len(p) else int(p.nonzero()[-1])


def cumulate(p: Tensor) -> Tensor:
    """Cumulative sum of distributions [..., V], in the widest type of their device: Apple GPUs have no float64."""
    return p.cumsum(-1, dtype=torch.float32 if p.device.type == "mps" else torch.float64)
