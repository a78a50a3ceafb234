"""SmartSpec: the draft length with the highest goodput."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from playground.algorithms.speculative.drafting import check_chain
from playground.algorithms.speculative.latency import Latency, Times, deviation, fitted
from playground.algorithms.speculative.speculation_math import block_efficiency
from playground.algorithms.speculative.speculative_loop import rounds
from playground.contract import Drafter, Lane, Preset, Verifier, knob, slot
from playground.events import Event, Figure, Note

MEASURED, SIMULATED = "measured", "simulated"
FREE = Latency(0.0, 0.0, 0.0)
Lengths = tuple[int, ...]


class Requests(NamedTuple):
    """Sequences of the batch that are alike: how many, their acceptance rate, and the tokens of each so far."""

    count: int
    alpha: float
    context: int


@dataclass(frozen=True)
class Server:
    """A batch of sequences whose draft tokens are verified together."""

    target: Latency
    draft: Latency = FREE

    @classmethod
    def simulated(cls, row: float, kv: float, draft: float) -> Server:
        """Times in units of reading the target's weights once: of an input token and a context token in a forward, and
        of a draft forward relative to a target forward.
        """
        return cls(Latency(1.0, row, kv), Latency(draft, draft * row, draft * kv))

    def time(self, lengths: Lengths, batch: list[Requests]) -> float:
        """Time of a round in which each sequence has so many draft tokens, by kind of request."""
        rows = sum(length * kind.count for length, kind in zip(lengths, batch))
        verifying = self.target.of(rows + sum(kind.count for kind in batch), _context(batch))
        return verifying + sum(self._drafting(step, lengths, batch) for step in range(max(lengths)))

    def _drafting(self, step: int, lengths: Lengths, batch: list[Requests]) -> float:
        """Time of one draft forward, for the sequences that have more draft tokens than `step`."""
        drafting = [kind for length, kind in zip(lengths, batch) if length > step]
        return self.draft.of(sum(kind.count for kind in drafting), _context(drafting))

    def goodput(self, lengths: Lengths, batch: list[Requests]) -> float:
        """Expected tokens of the whole batch per unit of time."""
        tokens = sum(kind.count * block_efficiency(kind.alpha, length) for length, kind in zip(lengths, batch))
        return tokens / self.time(lengths, batch)

    def best_lengths(self, batch: list[Requests], most: int) -> Lengths:
        """The draft lengths with the highest goodput, by kind of request; the fewest draft tokens on ties."""
        every = product(range(most + 1), repeat=len(batch))
        return max(every, key=lambda each: (self.goodput(each, batch), -sum(each)))


def _context(batch: list[Requests]) -> int:
    return sum(kind.count * kind.context for kind in batch)


class PacedDrafter:
    """Wraps a drafter: chooses the draft length before each round and estimates the acceptance rate after it.

    The length depends on earlier rounds only, never on the round's own draft tokens, so the output is exact. Tested and
    accepted counts decay at the same rate; the mean of per-round rates would be biased low, because a round ends at its
    first rejection.
    """

    def __init__(self, drafter: Drafter, server: Server, knobs: SmartSpec):
        self.drafter, self.server, self.knobs = drafter, server, knobs
        self.name, self.needs, self.translates = drafter.name, drafter.needs, drafter.translates
        self.tested = 1 / knobs.weight  # prior: one tested draft token per earlier round
        self.accepted = knobs.accept * self.tested
        self.idle = 0  # rounds since the last draft token

    @property
    def alpha(self) -> float:
        """Acceptance rate estimated from the rounds so far."""
        return min(0.99, max(0.01, self.accepted / self.tested))

    def propose(self, lm: Lane, budget) -> Iterator:
        most, batch = min(self.drafter.depth, budget), self._batch(len(lm.tokens))
        lengths = self.server.best_lengths(batch, most)
        goodputs = [self.server.goodput((length, *lengths[1:]), batch) for length in range(most + 1)]
        yield from self._figures(lm, goodputs, lengths)
        length, self.idle = lengths[0], 0 if lengths[0] else self.idle + 1
        if self.idle > self.knobs.probe:
            length = min(most, 1)
        return (yield from self.drafter.propose(lm, length))

    def _batch(self, context: int) -> list[Requests]:
        """This text and the other ones of the batch, which are as long."""
        load, others = self.knobs.load, self.knobs.others
        if not others or load == 1:
            return [Requests(load, self.alpha, context)]
        return [Requests(1, self.alpha, context), Requests(load - 1, others, context)]

    def observe(self, tree, rows, verdict) -> None:
        tested = {test.node for test in verdict.tests}
        if tested:
            decay = 1 - self.knobs.weight
            self.idle, self.tested, self.accepted = (
                0,
                decay * self.tested + len(tested),
                decay * self.accepted + len(verdict.kept),
            )
        self.drafter.observe(tree, rows, verdict)

    def _figures(self, lm: Lane, goodputs: list[float], lengths: Lengths) -> Iterator[Event]:
        x, batch = lm.generated, self.knobs.batch
        yield Figure(
            "bars",
            f"predicted goodput by draft length ({batch})",
            {"labels": list(map(str, range(len(goodputs)))), "values": goodputs},
        )
        series = {"draft tokens": lengths[0]} | ({"of the others": lengths[1]} if len(lengths) > 1 else {})
        yield Figure("scalar", f"draft length with the highest goodput ({batch})", {"x": x, "series": series})
        yield Figure("scalar", "estimated acceptance rate", {"x": x, "series": {"estimate": self.alpha}})
        if not lengths[0] and not self.idle:
            yield Note(
                f"With a {batch}, a round without draft tokens has the highest goodput: "
                f"{goodputs[0]:.2f} tokens per {'second' if self.knobs.costs == MEASURED else 'unit of time'}."
            )


class SmartSpec(Preset):
    """Before every round, choose the draft length with the highest goodput, the expected tokens per unit of time.

    Expected tokens follow from the recent acceptance rate, the time from a latency model with a part for reading the
    weights, one for each input token and one for each token of context. It is fitted to forwards of target and draft
    that are measured on this machine before the first round, once in a process. With `load` the batch has that many
    sequences, this one and others as long, with an acceptance rate of their own if `others` is given: each gets the
    length that serves the batch. A server under high load drafts less and eventually not at all; its other sequences
    are not run, so its times are predictions. `simulated` takes costs from knobs instead, relative to reading the
    target's weights once. The drafter's depth is the maximum length considered; depth 0 is plain decoding. Chains
    only: a draft model, or prompt lookup, whose draft tokens are free. Liu et al. 2024, arXiv 2406.14066.
    """

    name, title, paper, sheet = (
        "smartspec",
        "SmartSpec: draft length by goodput",
        "2406.14066",
        "speculative/smartspec-goodput",
    )
    guarantee = ("greedy_identical", "distribution_identical", "collapses")

    drafter: Drafter = slot("draft_model")
    verifier: Verifier = slot("rejection")
    costs: str = knob(
        MEASURED, choices=(MEASURED, SIMULATED), help="latencies measured on this machine, or those of the next knobs"
    )
    load: int = knob(1, 1, 64, step=1, help="sequences in the batch; all but this one are imagined")
    others: float = knob(
        0.0, 0.0, 0.99, step=0.01, help="acceptance rate of the other sequences of the batch; 0: that of this one"
    )
    row: float = knob(0.02, 0.0, 0.5, step=0.005, help="simulated cost of one input token in a forward")
    kv: float = knob(0.0001, 0.0, 0.01, step=0.0001, help="simulated cost of one context token in a forward")
    draft: float = knob(
        0.2, 0.0, 2.0, step=0.05, help="simulated cost of a draft forward, relative to a target forward"
    )
    accept: float = knob(0.7, 0.01, 0.99, step=0.01, help="initial estimate of the acceptance rate")
    weight: float = knob(
        0.15,
        0.01,
        0.5,
        step=0.01,
        help="weight of the latest round in the estimate; earlier rounds decay accordingly",
    )
    probe: int = knob(
        50, 1, 200, step=1, help="rounds without draft tokens after which one is drafted as a probe"
    )

    def check(self):
        check_chain(self.name, self.drafter)

    @property
    def batch(self) -> str:
        """The batch in a few words."""
        if self.costs == SIMULATED:
            return f"simulated batch of {self.load}"
        return "latencies of this machine" if self.load == 1 else f"batch of {self.load}, latencies of this machine"

    def decode(self, lm: Lane) -> Iterator:
        server = yield from self.server(lm)
        yield from rounds(lm, PacedDrafter(self.drafter, server, self), self.verifier)

    def server(self, lm: Lane) -> Iterator:
        """The server, after its latencies have been measured if they are not simulated."""
        drafts = "draft" in self.drafter.needs
        if self.costs == SIMULATED:
            return Server.simulated(self.row, self.kv, self.draft if drafts else 0.0)
        latencies = []
        for stream in ["target", "draft"] if drafts else ["target"]:
            times = yield lm.forward_times(stream)
            latencies.append(fitted(times))
            yield _said(stream, latencies[-1], times)
        return Server(*latencies)


def _said(stream: str, latency: Latency, times: Times) -> Note:
    fixed, row, slot = (1000 * part for part in latency)
    return Note(
        f"A forward of the {stream} on this machine takes {fixed:.3g} ms, {row:.3g} ms for each input token and "
        f"{slot:.2g} ms for each token of context: a fit to {len(times)} measured sizes, which it misses by "
        f"{deviation(latency, times):.0%} on average."
    )
