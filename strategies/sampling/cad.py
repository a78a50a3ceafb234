"""Context-aware decoding."""
from collections.abc import Iterator

from playground.algorithms.sampling.context_shift import told
from playground.contract import Sampler, knob
from playground.engine.sampling import contrast
from playground.events import Event


class CAD(Sampler):
    """Amplify what a context changes: the model reads the question with the context and without it, and the difference
    counts more.

    Scores become (1 + alpha) * with - alpha * without, one forward more for each token. alpha = 0 is the model with its
    context, alpha = -1 the model without. The choice stays argmax unless another sampler draws. Where memory finds a
    token all but impossible, a large alpha lifts it out of proportion; nothing here hides that. Shi et al. 2023, arXiv
    2305.14739.
    """

    name, title, paper, sheet = "cad", "Context-aware decoding", "2305.14739", "sampling/adacad"
    stage, draws, streams = "mix", False, ("without_context",)
    needs, guarantee = ("context",), ("collapses",)

    alpha: float = knob(
        0.5, -1.0, 3.0, step=0.1, help="strength of what the context changes; 0 adds nothing, -1 leaves the context out"
    )

    def mix(self, rows):
        return contrast(rows["target"], rows["without_context"], self.alpha)

    def observe(self, rows, token, position) -> Iterator[Event]:
        return told(rows, self.alpha, token, position)
