"""Many texts drawn from one prompt, side by side: the prompt is read once, and a text that is complete costs no more.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from playground.events import Event

if TYPE_CHECKING:
    from playground.decoding.lane import Lane
    from playground.decoding.sequence import Sequence


@dataclass(eq=False)
class SampledText:
    """One text and the sum of the log-probabilities, in nats, that the model itself gave the tokens drawn for it."""

    leaf: Sequence
    logp: float = 0.0
    drawn: int = 0  # tokens in that sum; what a grammar forced is not among them

    @property
    def mean(self) -> float:
        return self.logp / max(1, self.drawn)

    @property
    def label(self) -> str:
        return f"#{self.leaf.number}"


Watch = Callable[[list[SampledText], bool], Iterable[Event]]
Enough = Callable[[list[SampledText]], bool]


def all_complete(samples: list[SampledText]) -> bool:
    return all(sample.leaf.reason for sample in samples)


def draw_many(lm: Lane, count: int, watch: Watch, enough: Enough = all_complete) -> Iterator:
    """Draw texts until each is complete, or `enough` of them are; returns them as samples. Text j is the same however
    many there are.

    After every token `watch(samples, whether one was completed)` says what is to be shown.
    """
    yield lm.prefill()
    samples = [SampledText(leaf) for leaf in lm.fork(count)]
    while not enough(samples) and (growing := [sample for sample in samples if not sample.leaf.reason]):
        rows = yield lm.extend([sample.leaf for sample in growing])
        choices = [lm.pick(row) for row in rows]
        for sample, row, choice in zip(growing, rows, choices):
            sample.logp, sample.drawn = sample.logp + float(row.logp[0, choice.token]), sample.drawn + 1
        yield lm.keep(choices)
        yield from watch(samples, any(sample.leaf.reason for sample in growing))
    return samples


def finished(samples: list[SampledText]) -> list[SampledText]:
    """Those that came to an end by themselves."""
    return [sample for sample in samples if sample.leaf.reason not in (None, "length")]


def whole(samples: list[SampledText]) -> list[SampledText]:
    """Those that came to an end by themselves; where the length cut every one off, all of them."""
    return finished(samples) or [sample for sample in samples if sample.leaf.reason]
