"""Eta sampling."""
import torch

from playground.contract import Sampler, knob
from playground.engine import sampling


class Eta(Sampler):
    """Draw only among tokens above a floor that sinks where the row is flat, so that rows with many good tokens are not
    cut short.

    The floor is the smaller of eta and sqrt(eta) * exp(-H), with H the entropy of the row in nats; the most probable
    token always stays. eta = 0 keeps all. Hewitt et al. 2022, arXiv 2210.15191.
    """

    name, title, paper, sheet, rank = "eta", "Eta", "2210.15191", "sampling/sampling-baselines", 7
    guarantee = ("collapses",)

    eta: float = knob(
        0.002, 0.0, 0.1, step=0.0001, help="the floor where the model is sure, usually 0.0003 to 0.004; 0 keeps all"
    )

    def apply(self, scores, histories):
        highest = scores.new_tensor(self.eta)
        return sampling.floor(
            scores, torch.minimum(highest, highest.sqrt() * (-sampling.entropy(scores)).exp())[..., None]
        )
