"""PEARL: two models at work at the same time."""
from collections.abc import Iterator
from dataclasses import dataclass

from playground.algorithms.speculative.drafting import independent, new_tree
from playground.contract import Preset, Verifier, knob, slot
from playground.contract.token_tree import TokenTree
from playground.events import Event, Figure, Switch

UNIT = "virtual clock, in passes of the draft; reckoned, not measured"


@dataclass
class Clock:
    """What the steps so far would take on two devices and on one, where a pass of the target takes as long as `cost`
    passes of the draft.

    Reading the prompt counts as one pass of each model.
    """

    cost: float
    at_once: float = 0.0
    in_turn: float = 0.0

    def tick(self, guesses: int, checks: bool) -> Event:
        """One step: both models begin together, and it is over when the slower one is done."""
        self.at_once += max(guesses, self.cost * checks)
        self.in_turn += guesses + self.cost * checks
        return Figure(
            "bars",
            f"one step ({UNIT})",
            {"labels": ["the draft guesses", "the target checks"], "values": [guesses, self.cost * checks]},
        )

    def figure(self, tokens: int) -> Event:
        """Where the clock stands once so many tokens are written; plain decoding takes a pass of the target for each.
        """
        series = {
            "both models at once": self.at_once,
            "the same steps in turn": self.in_turn,
            "plain decoding": self.cost * tokens,
        }
        return Figure("scalar", f"time so far ({UNIT})", {"x": tokens, "series": series})


class Pearl(Preset):
    """The draft model guesses while the target checks: neither waits for the other, and a chain goes on until something
    is refused.

    While the draft makes gamma guesses, the target reads the text and says what it thinks of the first (pre-verify). If
    that stands, the target reads the others while the draft already guesses past them (post-verify), and so on; where a
    guess is refused, all behind it is dropped. There is no bonus token: the draft's first new guess has its place.
    Without `post` the draft waits for each check, without `pre` the first guess is checked with the others; without
    both this is plain speculation, and gamma = 0 is plain decoding. Where the models lie on two devices the target's
    pass really runs while the draft guesses, and seconds show what that brings; on one device they take turns, and the
    draft reads pending guesses again, so the virtual clock shows what two devices would make of the same steps. Liu et
    al. 2024, arXiv 2408.11850.
    """

    name, title, paper, sheet = "pearl", "PEARL: guessing while checking", "2408.11850", "speculative/pearl"
    needs, guarantee = ("draft",), ("greedy_identical", "distribution_identical", "collapses")
    drawn = "independent"

    verifier: Verifier = slot("rejection")
    gamma: int = knob(4, 0, 16, step=1, help="guesses a step, best about as many as `cost`; 0 is plain decoding")
    pre: bool = knob(True, help="check the first guess while the others are being made")
    post: bool = knob(True, help="guess on while guesses are being checked")
    at_once: str = knob(
        "auto",
        choices=("auto", "always", "never"),
        help="really run both models at the same time: auto is where they lie on two devices",
    )
    cost: float = knob(
        4.0,
        1.0,
        32.0,
        step=0.5,
        help="passes of the draft that take as long as one of the target: assumed, for the virtual clock alone",
    )

    def decode(self, lm) -> Iterator:
        clock, tree = Clock(self.cost), new_tree(lm, self)
        yield lm.prefill()
        while True:
            pending = len(tree)
            rows = yield from self._step(lm, tree)
            yield clock.tick(len(tree) - pending, rows is not None)
            if rows is not None:
                tree = yield from self._checked(lm, tree, rows, clock)
            if bool(pending) != bool(len(tree)):
                yield self._switch(lm, len(tree))

    def _step(self, lm, tree) -> Iterator:
        """Add guesses to those that are pending, while the target reads these; returns its rows, None where it was not
        asked.
        """
        pending, count = len(tree), self._count(lm, len(tree))
        if not count:
            return (yield lm.extend(tree))
        checks = bool(pending or self.pre)
        under_way = (yield lm.aside(lm.extend(tree))) if checks and self._at_once(lm) else None
        rows = (yield lm.extend(tree)) if checks and not under_way else None
        yield from self._guess(lm, tree, pending + count)
        if under_way:
            rows = yield under_way
        # nothing could be guessed, as where the grammar leaves the draft nothing
        stuck = rows is None and len(tree) == pending
        return (yield lm.extend(tree)) if stuck else rows

    def _at_once(self, lm) -> bool:
        return (
            self.at_once == "always"
            or self.at_once == "auto"
            and lm.stream("draft").model.device != lm.target.model.device
        )

    def _guess(self, lm, tree, count: int) -> Iterator:
        """Let the draft add to a chain until it has so many guesses, or none can follow."""
        draft = lm.stream("draft")
        ahead = yield draft.extend(tree)
        while independent(lm, tree, ahead, len(tree) - 1, 1) and len(tree) < count:
            ahead = yield draft.extend(tree)

    def _count(self, lm, pending: int) -> int:
        """Guesses to make in this step; a token after the last of them has to fit into the text as well."""
        waits = pending and not self.post
        return 0 if waits else max(0, min(self.gamma, lm.remaining - 1 - pending))

    def _checked(self, lm, tree, rows, clock) -> Iterator:
        """Judge what the target has read and keep what stands; returns the guesses that are pending now."""
        if len(tree):
            yield tree.draft()
        verdict, start = self.verifier.judge(lm, tree, rows), len(lm.tokens)
        if len(tree):
            yield verdict
        stood = len(verdict.kept)
        yield clock.figure(lm.generated + stood + (verdict.token >= 0))
        yield lm.keep(verdict)
        # by another token than guessed, or one a grammar forced
        went_on = verdict.token >= 0 or len(lm.tokens) > start + stood
        return new_tree(lm, self) if went_on else behind(tree, stood)

    def _switch(self, lm, pending: int) -> Event:
        if pending:
            return Switch(
                lm.generated,
                "post-verify",
                f"{pending} guesses are pending: the draft guesses on while they are checked",
            )
        return Switch(
            lm.generated, "pre-verify", "nothing is pending: the first guess is checked while the next are made"
        )


def behind(chain: TokenTree, count: int) -> TokenTree:
    """A chain without its first guesses, each drawn as it was."""
    rest = TokenTree(chain.source, chain.drawn)
    for node in range(count, len(chain)):
        rest.add(chain.tokens[node], len(rest) - 1, chain.q[node], chain.confidence[node])
    return rest
