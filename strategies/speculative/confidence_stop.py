"""A draft model that stops when it is uncertain, with an adaptive draft length."""
from collections.abc import Iterator

from playground.algorithms.speculative.drafting import draft_distribution, grow, independent, new_tree
from playground.contract import Drafter, Lane, knob
from playground.events import Figure


class ConfidenceStop(Drafter):
    """Draft with a smaller model until it is uncertain, up to a length that adapts to the number of accepted tokens.

    Two rules are common. In the transformers library the draft ends after a token with a probability below the
    threshold, which is still sent to the target. In llama.cpp (`p_min`) it ends before a position whose most probable
    token is below it. Neither drops a token because of its value, so the output distribution is the target's. The
    heuristic schedule allows two more draft tokens after a round without a rejection and one fewer after any other.
    Useful where predictable and unpredictable passages alternate: a fixed length is too short for the former and too
    long for the latter. A threshold of 0 with the constant schedule is a plain draft chain. Gante 2023 (assisted
    generation); llama.cpp 2024.
    """

    name, title, paper, sheet = (
        "confidence_stop", "Draft model with a confidence stop", "Gante 2023", "speculative/assisted"
    )
    needs, drawn, guarantee = ("draft",), "independent", ("collapses",)

    threshold: float = knob(0.4, 0.0, 1.0, step=0.05, help="probability below which drafting stops; 0: never")
    rule: str = knob(
        "transformers",
        choices=("transformers", "llama.cpp"),
        help="stop after an improbable draft token, or before a position without a probable one",
    )
    length: int = knob(8, 0, 32, step=1, help="draft tokens per round, at first; 0 is plain decoding")
    schedule: str = knob(
        "heuristic", choices=("constant", "heuristic"), help="heuristic: two more after full acceptance, else one fewer"
    )

    def __post_init__(self):
        self._allowed = self.length

    def propose(self, lm: Lane, budget) -> Iterator:
        tree, depth = new_tree(lm, self), min(self._allowed, budget)

        def level(rows, leaves, number):
            return self._level(lm, tree, rows, leaves[0])

        yield from grow(lm, lm.stream("draft"), tree, depth, level)
        yield Figure("scalar", "draft length", {"x": lm.generated, "series": {"drafted": len(tree), "allowed": depth}})
        return tree

    def _level(self, lm: Lane, tree, rows, leaf) -> list[int]:
        """Add the next draft token, unless the draft model is too uncertain; returns an empty list to end the draft."""
        q = draft_distribution(lm, tree, rows, leaf)
        if q is None or self.rule == "llama.cpp" and float(q.max()) < self.threshold:
            return []
        added = independent(lm, tree, rows, leaf, 1)
        unsure = self.rule == "transformers" and added and float(q[tree.tokens[added[0]]]) < self.threshold
        return [] if unsure else added

    def observe(self, tree, rows, verdict) -> None:
        if self.schedule == "heuristic" and self.length and len(tree):
            self._allowed = next_length(self._allowed, len(verdict.kept) == len(tree))


def next_length(length: int, all_accepted: bool) -> int:
    """Draft length of the next round, by the heuristic of the transformers library."""
    return length + 2 if all_accepted else max(1, length - 1)
