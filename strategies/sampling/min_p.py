"""Min-p sampling."""
from playground.contract import Sampler, knob
from playground.engine import sampling


class MinP(Sampler):
    """Truncate to tokens at least m times as probable as the best, a threshold that rises with the model's confidence.

    m = 1 is greedy unless tokens tie, m = 0 keeps all. Nguyen et al. 2024, arXiv 2407.01082.
    """

    name, title, paper, sheet, rank = "min_p", "Min-p", "2407.01082", "sampling/sampling-baselines", 4
    guarantee = ("collapses",)
    reads_text = False

    m: float = knob(0.05, 0.0, 1.0, step=0.01, help="smallest probability, relative to the best; 0 keeps all")

    def apply(self, scores, histories):
        return sampling.min_p(scores, self.m)
