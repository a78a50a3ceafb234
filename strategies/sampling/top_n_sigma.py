"""Top-n-sigma sampling."""
import torch

from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED


class TopNSigma(Sampler):
    """Truncate to tokens whose score lies within n standard deviations of the best.

    Most scores of a row are noise around their mean, and a few are far above it. The standard deviation is over all
    scores not yet removed. Differences and deviation scale together, so a temperature changes the probabilities of the
    tokens kept, but not which are kept. n = 0 turns it off. Tang et al. 2024, arXiv 2411.07641.
    """

    name, title, paper, sheet, rank = "top_n_sigma", "Top-n-sigma", "2411.07641", "sampling/sampling-baselines", 0
    guarantee = ("collapses",)
    reads_text = False

    n: float = knob(1.0, 0.0, 5.0, step=0.1, help="standard deviations below the best score that are kept; 0 keeps all")

    def apply(self, scores, histories):
        if self.n <= 0:
            return scores
        return scores.masked_fill(scores < scores.amax(-1, keepdim=True) - self.n * deviation(scores), REMOVED)


def deviation(scores: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each row's scores, without removed ones, [n, 1]."""
    left = scores > REMOVED
    count = left.sum(-1, keepdim=True)
    mean = scores.where(left, 0).sum(-1, keepdim=True) / count
    return (((scores - mean) ** 2).where(left, 0).sum(-1, keepdim=True) / count).sqrt()
