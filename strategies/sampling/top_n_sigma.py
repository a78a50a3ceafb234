"""Top-n-sigma sampling."""
import torch

from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED


class TopNSigma(Sampler):
    """Draw only among tokens whose score lies within n standard deviations of the best: what stands out from the noise
    stays.

    Most scores of a row are noise around their mean, and a few stand out. The deviation is that of all scores that are
    left. Largest score and deviation scale together, so a temperature changes the chances of what is kept, never what
    is kept. n = 0 turns it off. Tang et al. 2024, arXiv 2411.07641.
    """

    name, title, paper, sheet, rank = "top_n_sigma", "Top-n-sigma", "2411.07641", "sampling/sampling-baselines", 0
    guarantee = ("collapses",)

    n: float = knob(1.0, 0.0, 5.0, step=0.1, help="standard deviations below the best score that are kept; 0 keeps all")

    def apply(self, scores, histories):
        if self.n <= 0:
            return scores
        return scores.masked_fill(scores < scores.amax(-1, keepdim=True) - self.n * deviation(scores), REMOVED)


def deviation(scores: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each row's scores, removed ones left out, [n, 1]."""
    left = scores > REMOVED
    count = left.sum(-1, keepdim=True)
    mean = scores.where(left, 0).sum(-1, keepdim=True) / count
    return (((scores - mean) ** 2).where(left, 0).sum(-1, keepdim=True) / count).sqrt()
