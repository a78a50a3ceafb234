"""Distillation: the draft learns to guess what the target will say.

For the first part of the budget the draft learns from the data, as the target did: cheap, and it brings it near. Then
it learns the target's whole distributions on the same windows, some of which the target wrote (`samples.py`). What
counts for a draft is how often the target accepts its guess, and that is the overlap of the two distributions, not the
draft's own loss. Source: Hinton and others, arXiv 1503.02531; for drafts, DistillSpec, arXiv 2310.08461 (forward KL on
fixed text).
"""
import torch

from playground.pocket.train import weighted

ON_DATA = 0.25                    # share of the budget before the target is asked


class DraftLoss:
    """The loss of a draft that is distilled from `target` (frozen, already in its training attention)."""

    def __init__(self, target, on_data=ON_DATA):
        self.target, self.on_data = target.eval().requires_grad_(False).bfloat16(), on_data

    def __call__(self, draft, batch, trainer):
        ids, weights = batch.predicted
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = draft(**batch.read).logits
        if trainer.progress < self.on_data:
            return weighted(logits, ids, weights)
        with torch.no_grad():
            wanted = self.target(**batch.read).logits.float().softmax(-1)
        return soft(logits, wanted, weights)


def soft(logits, wanted, weights):
    """Mean cross-entropy against distributions, in nats, by weight. logits, wanted: (rows, tokens, vocabulary)."""
    losses = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)
