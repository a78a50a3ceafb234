"""Top-H sampling."""
import torch
from torch.special import entr

from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED, largest

MOST = 100  # tokens considered


class TopH(Sampler):
    """Truncate to the most probable tokens that make up at most a share h of the distribution's entropy.

    Of the 100 most probable tokens, renormalised, those are kept whose terms -p ln p add up to at most h times the
    entropy of all 100; the first always stays. So a peaked distribution keeps few tokens and a flat one many. h = 1
    keeps all 100; the transformers library may lose the last of them to rounding. Potraghloo et al. 2025, arXiv
    2509.02510.
    """

    name, title, paper, sheet, rank = "top_h", "Top-H", "2509.02510", "sampling/sampling-baselines", 1
    guarantee = ("heuristic",)
    reads_text = False

    h: float = knob(
        0.4, 0.05, 1.0, step=0.05, help="share of the entropy that may be kept; 1 keeps the 100 most probable tokens"
    )

    def apply(self, scores, histories):
        best, order = largest(scores, min(MOST, scores.shape[-1]))
        p = (best - best.logsumexp(-1, keepdim=True)).softmax(-1)
        kept = entr(p).cumsum(-1) <= self.h * entr(p).sum(-1, keepdim=True)
        kept[..., 0] = True
        kept |= self.h >= 1  # rounding may put the complete sum above the entropy
        return torch.full_like(scores, REMOVED).scatter(-1, order, best.masked_fill(~kept, REMOVED))
