"""Top-p (nucleus) sampling."""
from playground.contract import Sampler, knob
from playground.engine import sampling


class TopP(Sampler):
    """Truncate to the smallest set of most probable tokens whose probabilities add up to p.

    A peaked distribution keeps few tokens, a flat one many. The token that makes the sum reach p stays. Of equally
    probable tokens those with the lowest ids stay; which ones the transformers library keeps is undefined. p = 0 is
    greedy, p = 1 keeps all. Holtzman et al. 2020, arXiv 1904.09751.
    """

    name, title, paper, sheet, rank = "top_p", "Top-p (nucleus)", "1904.09751", "sampling/sampling-baselines", 3
    guarantee = ("collapses",)
    reads_text = False

    p: float = knob(0.9, 0.0, 1.0, step=0.01, help="probability that is kept; 1 keeps all")

    def apply(self, scores, histories):
        return sampling.top_p(scores, self.p)
