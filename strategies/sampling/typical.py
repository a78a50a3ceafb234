"""Typical sampling."""
import torch

from playground.contract import Sampler, knob


class Typical(Sampler):
    """Truncate to the tokens whose surprise is closest to the entropy; the most probable token may be removed.

    The surprise of a token is -ln p, and its mean is the entropy of the distribution. The tokens closest to it stay
    until their mass reaches M, with those that tie with the last of them. M = 1 keeps all. Meister et al.
    2022, arXiv 2202.00666.
    """

    name, title, paper, sheet, rank = "typical", "Typical", "2202.00666", "sampling/sampling-baselines", 5
    guarantee = ("heuristic",)

    mass: float = knob(0.9, 0.0, 1.0, step=0.01, help="M, the mass to keep, usually 0.2 to 0.95; 1 keeps all")

    def apply(self, scores, histories):
        if self.mass == 1:   # a rounded sum can reach 1 before the last token
            return scores
        p, logp = scores.softmax(-1), scores.log_softmax(-1)
        entropy = torch.special.entr(p).sum(-1, keepdim=True)   # a removed token, p = 0, adds 0
        gap = (-logp - entropy).abs()
        nearest, order = gap.sort(-1)
        last = (p.gather(-1, order).cumsum(-1)[:, :-1] < self.mass).sum(-1, keepdim=True)
        return scores.masked_fill(gap > nearest.gather(-1, last), -torch.inf)
