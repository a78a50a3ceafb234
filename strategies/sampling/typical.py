"""Typical sampling."""
import math

import torch

from playground.contract import Sampler, knob
from playground.engine.sampling import entropy_of


class Typical(Sampler):
    """Truncate to the tokens whose surprise is closest to the entropy; the most probable token may be removed.

    The surprise of a token is -ln p, and its mean is the entropy of the distribution. The tokens closest to it stay
    until their mass reaches M, with those that tie with the last of them. M = 1 keeps all. Meister et al. 2022, arXiv
    2202.00666.
    """

    name, title, paper, sheet, rank = "typical", "Typical", "2202.00666", "sampling/sampling-baselines", 5
    guarantee = ("heuristic",)
    reads_text = False

    mass: float = knob(0.9, 0.0, 1.0, step=0.01, help="M, the mass to keep, usually 0.2 to 0.95; 1 keeps all")

    def apply(self, scores, histories):
        if self.mass == 1:   # a rounded sum can reach 1 before the last token
            return scores
        logp = scores.log_softmax(-1)
        p = logp.exp()
        entropy = entropy_of(p, scores)[..., None]
        gap = (-logp - entropy).abs()
        nearest, order = gap.topk(self._most(gap, entropy), largest=False)
        last = (p.gather(-1, order).cumsum(-1)[:, :-1] < self.mass).sum(-1, keepdim=True)
        return scores.masked_fill(gap > nearest.gather(-1, last), -torch.inf)

    def _most(self, gap: torch.Tensor, entropy: torch.Tensor) -> int:
        """A number of nearest tokens that suffices for the mass in every row; the others need not be sorted.

        Tokens farther away than the entropy are improbable: with a gap above g each has less than exp(-entropy - g).
        """
        removed = (1 - self.mass) / 2
        reach = torch.maximum(entropy, math.log(gap.shape[-1] / removed) - entropy)
        return max(1, int((gap <= reach).sum(-1).max()))  # none is within reach where a grammar allows no token
