"""PEARL: drafting and verification in parallel."""
from collections.abc import Iterator
from dataclasses import dataclass

from playground.algorithms.speculative.drafting import independent, new_tree
from playground.contract import Lane, Preset, Verifier, knob, slot
from playground.contract.token_tree import TokenTree
from playground.events import Event, Figure, Switch

UNIT = "virtual clock, in draft forwards; simulated, not measured"


@dataclass
class Clock:
    """Simulated time of the steps so far on two devices and on one; a target forward takes `cost` draft forwards.

    Prefill counts as one forward of each model.
    """

    cost: float
    parallel: float = 0.0
    sequential: float = 0.0

    def tick(self, drafted: int, verifies: bool) -> Event:
        """Count one step. In parallel it takes as long as the slower model."""
        self.parallel += max(drafted, self.cost * verifies)
        self.sequential += drafted + self.cost * verifies
        return Figure(
            "bars",
            f"one step ({UNIT})",
            {"labels": ["the draft proposes", "the target verifies"], "values": [drafted, self.cost * verifies]},
        )

    def figure(self, tokens: int) -> Event:
        """The time for `tokens` tokens; plain decoding takes one target forward per token."""
        series = {
            "both models in parallel": self.parallel,
            "the same steps in sequence": self.sequential,
            "plain decoding": self.cost * tokens,
        }
        return Figure("scalar", f"time so far ({UNIT})", {"x": tokens, "series": series})


class Pearl(Preset):
    """The draft model drafts while the target verifies: neither waits for the other, and a draft continues until a
    rejection.

    While the draft model drafts gamma tokens, the target's forward over the text verifies the first (pre-verify). If it
    is accepted, the target reads the others while the draft continues past them (post-verify), and so on. A rejection
    discards all later draft tokens. There is no bonus token; the first new draft token takes its place. Without `post`
    the draft waits for each verification, without `pre` the first token is verified with the others; without both this
    is plain speculative decoding, and gamma = 0 is plain decoding. If the models are on two devices, both forwards run
    concurrently, and the measured seconds show the gain. On one device they alternate and the draft re-reads pending
    draft tokens; the virtual clock shows the time on two devices. Liu et al. 2024, arXiv 2408.11850.
    """

    name, title, paper, sheet = "pearl", "PEARL: drafting during verification", "2408.11850", "speculative/pearl"
    drafts_at_will = True
    needs, guarantee = ("draft",), ("greedy_identical", "distribution_identical", "collapses")
    drawn = "independent"

    verifier: Verifier = slot("rejection")
    gamma: int = knob(4, 0, 16, step=1, help="draft tokens per step, best close to `cost`; 0 is plain decoding")
    pre: bool = knob(True, help="pre-verify: verify the first draft token while the others are drafted")
    post: bool = knob(True, help="post-verify: continue drafting during verification")
    at_once: str = knob(
        "auto",
        choices=("auto", "always", "never"),
        help="run both models concurrently; auto does so if they are on different devices",
    )
    cost: float = knob(
        4.0,
        1.0,
        32.0,
        step=0.5,
        help="assumed draft forwards per target forward in time, for the virtual clock only",
    )

    def decode(self, lm: Lane) -> Iterator:
        clock, tree = Clock(self.cost), new_tree(lm, self)
        yield lm.prefill()
        while True:
            pending = len(tree)
            rows = yield from self._step(lm, tree)
            yield clock.tick(len(tree) - pending, rows is not None)
            if rows is not None:
                tree = yield from self._verified(lm, tree, rows, clock)
            if bool(pending) != bool(len(tree)):
                yield self._switch(lm, len(tree))

    def _step(self, lm: Lane, tree) -> Iterator:
        """Draft further tokens while the target reads the pending ones.

        Returns the target's rows, or None if this step had no target forward.
        """
        pending, count = len(tree), self._count(lm, len(tree))
        if not count:
            return (yield lm.extend(tree))
        verifies = bool(pending or self.pre)
        in_flight = (yield lm.aside(lm.extend(tree))) if verifies and self._is_concurrent(lm) else None
        rows = (yield lm.extend(tree)) if verifies and not in_flight else None
        yield from self._draft(lm, tree, pending + count)
        if in_flight:
            rows = yield in_flight
        # no token could be drafted, e.g. because the constraint allows the draft none
        stuck = rows is None and len(tree) == pending
        return (yield lm.extend(tree)) if stuck else rows

    def _is_concurrent(self, lm: Lane) -> bool:
        return (
            self.at_once == "always"
            or self.at_once == "auto"
            and lm.stream("draft").model.device != lm.target.model.device
        )

    def _draft(self, lm: Lane, tree, count: int) -> Iterator:
        """Extend a chain to `count` draft tokens, or until no token can follow."""
        draft = lm.stream("draft")
        rows = yield draft.extend(tree)
        while independent(lm, tree, rows, len(tree) - 1, 1) and len(tree) < count:
            rows = yield draft.extend(tree)

    def _count(self, lm: Lane, pending: int) -> int:
        """Tokens to draft in this step; leaves room for one token after the last of them."""
        waits = pending and not self.post
        return 0 if waits else max(0, min(self.gamma, (lm.draft_budget(self) or 0) - pending))

    def _verified(self, lm: Lane, tree, rows, clock) -> Iterator:
        """Verify what the target has read and commit what is accepted; returns the pending draft tokens."""
        if len(tree):
            yield tree.draft()
        verdict, start = self.verifier.judge(lm, tree, rows), len(lm.tokens)
        if len(tree):
            yield verdict
        accepted = len(verdict.kept)
        yield clock.figure(lm.generated + accepted + (verdict.token >= 0))
        yield lm.keep(verdict)
        # with a token that is not from the draft: a resampled or a forced one
        diverged = verdict.token >= 0 or len(lm.tokens) > start + accepted
        return new_tree(lm, self) if diverged else without_first(tree, accepted)

    def _switch(self, lm: Lane, pending: int) -> Event:
        if pending:
            return Switch(
                lm.generated,
                "post-verify",
                f"{pending} draft tokens are pending: drafting continues during their verification",
            )
        return Switch(
            lm.generated, "pre-verify", "nothing is pending: the first draft token is verified while others are drafted"
        )


def without_first(chain: TokenTree, count: int) -> TokenTree:
    """A chain without its first `count` tokens; q and confidence of the others are preserved."""
    rest = TokenTree(chain.source, chain.drawn)
    for node in range(count, len(chain)):
        rest.add(chain.tokens[node], len(rest) - 1, chain.q[node], chain.confidence[node])
    return rest
