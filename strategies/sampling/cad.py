"""Context-aware decoding."""
from collections.abc import Iterator

from playground.algorithms.sampling.context_shift import context_events
from playground.contract import Sampler, knob
from playground.engine.sampling import contrast, jensen_shannon
from playground.events import Event


class CAD(Sampler):
    """Amplify the effect of a context: contrast the logits with the context and without it.

    Scores become (1 + alpha) * with - alpha * without, at the cost of one more forward per token. alpha = 0 is the
    model with its context, alpha = -1 the model without. The choice stays argmax unless another sampler draws. There is
    no plausibility constraint: a large alpha disproportionately raises tokens that are nearly impossible without the
    context. Shi et al. 2023, arXiv 2305.14739.
    """

    name, title, paper, sheet = "cad", "Context-aware decoding", "2305.14739", "sampling/adacad"
    stage, draws, streams = "mix", False, ("without_context",)
    needs, guarantee = ("context",), ("collapses",)

    alpha: float = knob(
        0.5, -1.0, 3.0, step=0.1, help="strength of the contrast; 0 adds nothing, -1 ignores the context"
    )

    def mix(self, rows):
        return contrast(rows["target"], rows["without_context"], self.alpha)

    def observe(self, rows, token, position) -> Iterator[Event]:
        divergence = float(jensen_shannon(rows["target"], rows["without_context"]))
        return context_events(rows, self.alpha, divergence, token, position)
