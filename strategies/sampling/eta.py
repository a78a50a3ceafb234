"""Eta sampling."""
import torch

from playground.contract import Sampler, knob
from playground.engine import sampling


class Eta(Sampler):
    """Truncate to tokens above a probability threshold that decreases with the entropy of the distribution.

    The threshold is the smaller of eta and sqrt(eta) * exp(-H), with the entropy H in nats; the most probable token
    always stays. eta = 0 keeps all. Hewitt et al. 2022, arXiv 2210.15191.
    """

    name, title, paper, sheet, rank = "eta", "Eta", "2210.15191", "sampling/sampling-baselines", 7
    guarantee = ("collapses",)
    reads_text = False

    eta: float = knob(
        0.002, 0.0, 0.1, step=0.0001, help="threshold at low entropy, usually 0.0003 to 0.004; 0 keeps all"
    )

    def apply(self, scores, histories):
        eta = scores.new_tensor(self.eta)
        threshold = torch.minimum(eta, eta.sqrt() * (-sampling.entropy(scores)).exp())
        return sampling.floor(scores, threshold[..., None])
