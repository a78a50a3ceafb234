"""SmartSpec: guess as far as it pays."""
from collections.abc import Iterator
from dataclasses import dataclass

from playground.algorithms.speculative.drafting import check_chain
from playground.algorithms.speculative.speculation_math import block_efficiency
from playground.algorithms.speculative.speculative_loop import rounds
from playground.contract import Drafter, Preset, Verifier, knob, slot
from playground.events import Event, Figure, Note


@dataclass(frozen=True)
class Server:
    """A made-up server with `load` texts in a batch. Times are in units of reading the target's weights once."""

    load: int
    row: float  # what one more row costs
    kv: float  # what one more token of context costs
    draft: float  # a pass of what guesses, as a share of one of the target

    def time(self, length: int, context: int) -> float:
        """Of a step in which every text gets so many guesses, and has so many tokens."""
        return length * self.draft * self._pass(1, context) + self._pass(length + 1, context)

    def _pass(self, rows: int, context: int) -> float:
        """Of one forward with so many rows a text."""
        return 1 + self.load * (self.row * rows + self.kv * context)

    def goodput(self, length: int, alpha: float, context: int) -> float:
        """Expected tokens of the whole batch per unit of time, where each guess stands with chance alpha."""
        return self.load * block_efficiency(alpha, length) / self.time(length, context)


class Paced:
    """A drafter that is told before each round how far to guess, and what follows from how that went.

    The length depends on earlier rounds alone, never on a guess of its own, so the text stays exact. What was looked at
    and what stood fade alike; a mean of every round's share would be too low, for a round ends with its first refusal.
    """

    def __init__(self, drafter: Drafter, server: Server, knobs: "SmartSpec"):
        self.drafter, self.server, self.knobs = drafter, server, knobs
        self.tested = 1 / knobs.weight  # as if every round so far had looked at one guess
        self.stood = knobs.accept * self.tested
        self.idle = 0  # rounds since the last guess

    @property
    def alpha(self) -> float:
        """Chance that a guess stands, from the rounds so far."""
        return min(0.99, max(0.01, self.stood / self.tested))

    def propose(self, lm, budget) -> Iterator:
        context, most = len(lm.tokens), min(self.drafter.depth, budget)
        goodputs = [self.server.goodput(length, self.alpha, context) for length in range(most + 1)]
        length = goodputs.index(max(goodputs))  # of equals the shortest
        yield from self._told(lm, goodputs, length)
        self.idle = 0 if length else self.idle + 1
        if self.idle > self.knobs.probe:
            length = min(most, 1)
        return (yield from self.drafter.propose(lm, length))

    def observe(self, tree, rows, verdict) -> None:
        tested = {test.node for test in verdict.tests}
        if tested:
            left = 1 - self.knobs.weight
            self.idle, self.tested, self.stood = (
                0,
                left * self.tested + len(tested),
                left * self.stood + len(verdict.kept),
            )
        self.drafter.observe(tree, rows, verdict)

    def _told(self, lm, goodputs: list[float], length: int) -> Iterator[Event]:
        x, load = lm.generated, f"{self.server.load} texts at once, simulated"
        yield Figure(
            "bars",
            f"predicted goodput by guesses a round ({load})",
            {"labels": list(map(str, range(len(goodputs)))), "values": goodputs},
        )
        yield Figure(
            "scalar", f"number of guesses that promises most ({load})", {"x": x, "series": {"guesses": length}}
        )
        yield Figure(
            "scalar", "chance that a guess stands, from the rounds so far", {"x": x, "series": {"estimate": self.alpha}}
        )
        if not length and not self.idle:
            yield Note(
                f"With {load}, a round without guesses promises most: {goodputs[0]:.2f} tokens per unit of time."
            )


class SmartSpec(Preset):
    """Before every round, choose the number of guesses that promises most tokens per unit of time for the server as
    loaded as it is.

    Expected tokens follow from how often guesses stood lately; the time from a model of the server, in which every row
    of every text costs. So a busy server guesses less, and in the end not at all. There is only one text here: the load
    is simulated, as `load` copies of it, and so are all costs, which the knobs give as shares of reading the target's
    weights once; only acceptance and text are real. The drafter's depth is the most guesses considered; with depth 0
    this is plain decoding. Chains only: a draft model, or prompt lookup, whose guesses cost nothing. Liu et al. 2024,
    arXiv 2406.14066; the choice of a length for each text by itself is left out.
    """

    name, title, paper, sheet = (
        "smartspec",
        "SmartSpec: guesses by goodput (simulated load)",
        "2406.14066",
        "speculative/smartspec-goodput",
    )
    guarantee = ("greedy_identical", "distribution_identical", "collapses")

    drafter: Drafter = slot("draft_model")
    verifier: Verifier = slot("rejection")
    load: int = knob(8, 1, 64, step=1, help="texts the simulated server writes at once")
    row: float = knob(0.02, 0.0, 0.5, step=0.005, help="simulated cost of one more row in a pass")
    kv: float = knob(0.0001, 0.0, 0.01, step=0.0001, help="simulated cost of one more token of context in a pass")
    draft: float = knob(
        0.2, 0.0, 2.0, step=0.05, help="simulated cost of a pass of the draft model, as a share of one of the target"
    )
    accept: float = knob(0.7, 0.01, 0.99, step=0.01, help="chance that a guess stands, as long as nothing is known")
    weight: float = knob(
        0.15,
        0.01,
        0.5,
        step=0.01,
        help="of the newest round in that chance: what was seen before counts for that much less",
    )
    probe: int = knob(
        50, 1, 200, step=1, help="rounds without a guess after which one is made, to see whether it stands"
    )

    def check(self):
        check_chain(self.name, self.drafter)

    def decode(self, lm) -> Iterator:
        cost = self.draft if "draft" in self.drafter.needs else 0.0
        yield from rounds(lm, Paced(self.drafter, Server(self.load, self.row, self.kv, cost), self), self.verifier)
