"""Top-k sampling."""
from playground.contract import Sampler, knob
from playground.engine import sampling


class TopK(Sampler):
    """Truncate to the k most probable tokens and those that tie with the last of them.

    k = 1 is greedy, k = 0 keeps all. Fan et al. 2018, arXiv 1805.04833.
    """

    name, title, paper, sheet, rank = "top_k", "Top-k", "1805.04833", "sampling/sampling-baselines", 2
    guarantee = ("collapses",)
    reads_text = False

    k: int = knob(50, 0, 1000, step=1, help="keep this many tokens; 0 keeps all")

    def apply(self, scores, histories):
        return sampling.top_k(scores, self.k)
