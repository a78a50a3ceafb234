"""Adaptive-p sampling."""
from collections.abc import Iterator

from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED
from playground.events import Event, Figure

WIDTH, PEAK, SHARPNESS = 0.3, 5.0, 10.0  # of the curve of new logits, over the distance from the aim


class AdaptiveP(Sampler):
    """Prefer tokens whose probability is near a target, and steer so that the mean of the chosen probabilities meets
    it.

    No token is cut off: each gets a new logit, 5 at the aim and lower the farther its probability is from it. The aim
    is twice the target minus the decaying mean of what was chosen, so that a run of certain tokens is followed by rarer
    ones. Where one token is nearly certain, improbable ones are chosen to meet the target: cut those off before, with a
    mild min-p. Useful for lively prose at temperature 1; it acts after all truncations. A negative target samples
    from the distribution as it is. MrJackSpade 2025, as in llama.cpp since January 2026.
    """

    name, title, paper, sheet, rank = "adaptive_p", "Adaptive-p", "MrJackSpade 2025", "sampling/adaptive-p", 92
    row_wise, guarantee = False, ("collapses",)
    new_in = "2026"

    target: float = knob(0.5, -1.0, 1.0, step=0.05, help="probability that chosen tokens should have; negative: off")
    decay: float = knob(0.9, 0.0, 0.99, step=0.01, help="weight of earlier choices: 1 / (1 - decay) of them count")

    def __post_init__(self):
        self.count = 1 / (1 - self.decay)  # as if the text had met the target before it begins
        self.total = self.target * self.count

    @property
    def aim(self) -> float:
        """The probability that is preferred now, which corrects the mean of those chosen before."""
        return min(1.0, max(0.0, 2 * self.target - self.total / self.count))

    def apply(self, scores, histories):
        if self.target < 0:
            return scores
        distance = (scores.softmax(-1) - self.aim).abs() / WIDTH
        preferred = PEAK - SHARPNESS * distance.square() / (1 + distance)
        return preferred.masked_fill(scores == REMOVED, REMOVED)

    def observe(self, rows, token, position) -> Iterator[Event]:
        (scores,) = rows.values()
        if self.target < 0 or scores[token] == REMOVED:  # a forced token that an earlier sampler removed
            return
        aim, p = self.aim, float(scores.softmax(-1)[token])
        self.total, self.count = p + self.decay * self.total, 1 + self.decay * self.count
        series = {"chosen token": p, "mean so far": self.total / self.count, "aim": aim}
        lines = {"target": self.target}
        yield Figure("scalar", "probability against the target", {"x": position, "series": series, "lines": lines})
