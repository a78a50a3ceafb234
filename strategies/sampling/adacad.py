"""Adaptive context-aware decoding."""
from collections.abc import Iterator
from math import log

from playground.algorithms.sampling.context_shift import context_events
from playground.contract import Sampler, knob
from playground.engine.sampling import contrast, jensen_shannon
from playground.events import Event


class AdaCAD(Sampler):
    """Amplify the effect of a context, with a strength that grows with the conflict between context and model memory.

    The strength alpha of context-aware decoding is, per token, the Jensen-Shannon divergence between the distributions
    with and without the context: near 0 if they agree, at most ln 2 (1 in bits) if their supports are disjoint. A floor
    keeps the context effective in long texts, whose function words hardly diverge. Scores become (1 + alpha) * with -
    alpha * without; the choice stays argmax unless another sampler draws. Wang et al. 2024, arXiv 2409.07394.
    """

    name, title, paper, sheet = "adacad", "AdaCAD", "2409.07394", "sampling/adacad"
    stage, draws, streams = "mix", False, ("without_context",)
    needs, guarantee = ("context",), ("collapses",)

    floor: float = knob(0.0, 0.0, 1.0, step=0.05, help="smallest strength: 0 for short answers, 0.3 for summaries")
    base: str = knob("e", choices=("e", "2"), help="base of the divergence; in bits it is 1.44 times larger")

    def mix(self, rows):
        return contrast(rows["target"], rows["without_context"], self._alpha(rows)[:, None])

    def observe(self, rows, token, position) -> Iterator[Event]:
        divergence = jensen_shannon(rows["target"], rows["without_context"])
        return context_events(rows, float(self._strength(divergence)), float(divergence), token, position)

    def _alpha(self, rows):
        """Strength for each row, [n]."""
        return self._strength(jensen_shannon(rows["target"], rows["without_context"]))

    def _strength(self, divergence):
        """Strength for each divergence in nats."""
        return (divergence / (log(2) if self.base == "2" else 1.0)).clamp(min=self.floor)
