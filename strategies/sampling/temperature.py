"""Temperature."""
from playground.engine import sampling
from playground.strategy import Sampler, knob


class Temperature(Sampler):
    """Divide the scores by t before drawing: below 1 the likely gets likelier, above 1 chances even out.

    At t = 0 the largest score is taken; at t = 1 the row is drawn from as the model gave it. Ackley et al. 1985.
    """

    name, title, paper, sheet, stage = "temperature", "Temperature", "Ackley et al. 1985", "sampling/sampling-baselines", "temperature"
    guarantee = ("collapses",)

    t: float = knob(0.8, 0.0, 2.0, step=0.05, help="below 1 sharpens, above 1 flattens; 0 is greedy")

    def apply(self, scores, histories):
        return sampling.temperature(scores, self.t)
