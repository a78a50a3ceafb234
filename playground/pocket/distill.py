"""Distillation of the draft from the target.

For the first part of the budget the draft is trained on the data, like the target: this is cheap and gives a good
start. Then it is trained on the target's full distributions on the same windows, some of which the target wrote
(`target_samples.py`). A draft is judged by how often the target accepts its tokens, that is, by the overlap of the two
distributions, not by its own loss. Source: Hinton et al., arXiv 1503.02531; for drafts, DistillSpec, arXiv 2310.08461
(forward KL on fixed text).
"""
import torch

from playground.pocket.precision import mixed_precision, product_type
from playground.pocket.train import weighted

ON_DATA = 0.25                    # share of the budget before distillation starts


class DraftLoss:
    """Loss of a draft that is distilled from `target` (frozen, already switched to its training attention)."""

    def __init__(self, target, on_data=ON_DATA):
        self.target = target.eval().requires_grad_(False).to(product_type(target.device.type))
        self.on_data = on_data

    def __call__(self, draft, batch, trainer):
        ids, weights = batch.predicted
        with mixed_precision(ids.device):
            logits = draft(**batch.read).logits
        if trainer.progress < self.on_data:
            return weighted(logits, ids, weights)
        with torch.no_grad():
            wanted = self.target(**batch.read).logits.float().softmax(-1)
        return soft(logits, wanted, weights)


def soft(logits, wanted, weights):
    """Weighted mean cross-entropy to target distributions, in nats. logits, wanted: (rows, tokens, vocabulary)."""
    losses = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)
