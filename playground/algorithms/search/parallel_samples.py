"""Parallel sampling of several texts from one prompt, with a shared prefill. A finished text costs nothing more."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from playground.contract import RewardedText
from playground.events import Event

if TYPE_CHECKING:
    from playground.contract import Lane
    from playground.decoding.sequence import Sequence


@dataclass(eq=False)
class SampledText:
    """One text and the summed log-probability, in nats, of its sampled tokens under the unmodified model."""

    leaf: Sequence
    logp: float = 0.0
    drawn: int = 0  # tokens in that sum: all of them, where the decoder `counts_forced`

    @property
    def mean(self) -> float:
        return self.logp / max(1, self.drawn)

    @property
    def label(self) -> str:
        return f"#{self.leaf.number}"

    @property
    def rewarded(self) -> RewardedText:
        """The text as a reward reads it."""
        return RewardedText(self.leaf.tokens, self.logp)


Watch = Callable[[list[SampledText], bool], Iterable[Event]]
Enough = Callable[[list[SampledText]], bool]


def all_complete(samples: list[SampledText]) -> bool:
    return all(sample.leaf.reason for sample in samples)


def draw_many(lm: Lane, count: int, watch: Watch, enough: Enough = all_complete) -> Iterator:
    """Sample `count` texts until all are complete, or until `enough(samples)`; returns the samples.

    Sample j does not depend on `count`. After every token, `watch(samples, whether one was completed)` returns the
    events to show.
    """
    yield lm.prefill()
    samples = [SampledText(leaf) for leaf in lm.fork(count)]
    while not enough(samples) and (active := [sample for sample in samples if not sample.leaf.reason]):
        rows = yield lm.extend([sample.leaf for sample in active])
        choices = [lm.pick(row) for row in rows]
        for sample, row, choice in zip(active, rows, choices):
            sample.logp, sample.drawn = sample.logp + float(row.logp[0, choice.token]), sample.drawn + 1
        yield lm.keep(choices)
        yield from watch(samples, any(sample.leaf.reason for sample in active))
    return samples


def finished(samples: list[SampledText]) -> list[SampledText]:
    """The samples that ended by themselves."""
    return [sample for sample in samples if sample.leaf.reason not in (None, "length")]


def whole(samples: list[SampledText]) -> list[SampledText]:
    """The samples that ended by themselves; if every one was truncated by the length limit, all of them."""
    return finished(samples) or [sample for sample in samples if sample.leaf.reason]
