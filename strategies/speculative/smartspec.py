"""SmartSpec: the draft length with the highest goodput."""
from collections.abc import Iterator
from dataclasses import dataclass

from playground.algorithms.speculative.drafting import check_chain
from playground.algorithms.speculative.speculation_math import block_efficiency
from playground.algorithms.speculative.speculative_loop import rounds
from playground.contract import Drafter, Lane, Preset, Verifier, knob, slot
from playground.events import Event, Figure, Note


@dataclass(frozen=True)
class Server:
    """A simulated server with a batch of `load` sequences. Times are in units of reading the target's weights once."""

    load: int
    row: float  # cost of one input token
    kv: float  # cost of one context token
    draft: float  # cost of a draft forward relative to a target forward

    def time(self, length: int, context: int) -> float:
        """Time of a round with `length` draft tokens per sequence, at `context` tokens of context."""
        return length * self.draft * self._forward(1, context) + self._forward(length + 1, context)

    def _forward(self, rows: int, context: int) -> float:
        """Time of one forward with `rows` input tokens per sequence."""
        return 1 + self.load * (self.row * rows + self.kv * context)

    def goodput(self, length: int, alpha: float, context: int) -> float:
        """Expected tokens of the whole batch per unit of time, at acceptance rate alpha."""
        return self.load * block_efficiency(alpha, length) / self.time(length, context)


class PacedDrafter:
    """Wraps a drafter: chooses the draft length before each round and estimates the acceptance rate after it.

    The length depends on earlier rounds only, never on the round's own draft tokens, so the output is exact. Tested and
    accepted counts decay at the same rate; the mean of per-round rates would be biased low, because a round ends at its
    first rejection.
    """

    def __init__(self, drafter: Drafter, server: Server, knobs: "SmartSpec"):
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
        context, most = len(lm.tokens), min(self.drafter.depth, budget)
        goodputs = [self.server.goodput(length, self.alpha, context) for length in range(most + 1)]
        length = goodputs.index(max(goodputs))  # the shortest on ties
        yield from self._figures(lm, goodputs, length)
        self.idle = 0 if length else self.idle + 1
        if self.idle > self.knobs.probe:
            length = min(most, 1)
        return (yield from self.drafter.propose(lm, length))

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

    def _figures(self, lm: Lane, goodputs: list[float], length: int) -> Iterator[Event]:
        x, load = lm.generated, f"simulated batch of {self.server.load}"
        yield Figure(
            "bars",
            f"predicted goodput by draft length ({load})",
            {"labels": list(map(str, range(len(goodputs)))), "values": goodputs},
        )
        yield Figure(
            "scalar", f"draft length with the highest goodput ({load})", {"x": x, "series": {"draft tokens": length}}
        )
        yield Figure("scalar", "estimated acceptance rate", {"x": x, "series": {"estimate": self.alpha}})
        if not length and not self.idle:
            yield Note(
                f"With a {load}, a round without draft tokens has the highest goodput: "
                f"{goodputs[0]:.2f} tokens per unit of time."
            )


class SmartSpec(Preset):
    """Before every round, choose the draft length with the highest goodput, the expected tokens per unit of time at the
    server's current load.

    Expected tokens follow from the recent acceptance rate, the time from a cost model in which every input token of
    every sequence has a cost. A server under high load drafts less and eventually not at all. The load is simulated
    here as `load` copies of the one sequence, and so are all costs, which the knobs give relative to reading the
    target's weights once; only acceptance and text are real. The drafter's depth is the maximum length considered;
    depth 0 is plain decoding. Chains only: a draft model, or prompt lookup, whose draft tokens are free. The paper's
    per-sequence length is left out. Liu et al. 2024, arXiv 2406.14066.
    """

    name, title, paper, sheet = (
        "smartspec",
        "SmartSpec: draft length by goodput (simulated load)",
        "2406.14066",
        "speculative/smartspec-goodput",
    )
    guarantee = ("greedy_identical", "distribution_identical", "collapses")

    drafter: Drafter = slot("draft_model")
    verifier: Verifier = slot("rejection")
    load: int = knob(8, 1, 64, step=1, help="sequences in the simulated server's batch")
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

    def decode(self, lm: Lane) -> Iterator:
        cost = self.draft if "draft" in self.drafter.needs else 0.0
        server = Server(self.load, self.row, self.kv, cost)
        yield from rounds(lm, PacedDrafter(self.drafter, server, self), self.verifier)
