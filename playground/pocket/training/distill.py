"""Distillation of the draft from the target.

For the first part of the budget the draft is trained on the data, like the target: this is cheap and gives a good
start. Then it is trained on the target's full distributions on the same windows, some of which the target wrote
(`target_samples.py`). A draft is judged by how often the target accepts its tokens, that is, by the overlap of the two
distributions, not by its own loss. Source: Hinton et al., arXiv 1503.02531; for drafts, DistillSpec, arXiv 2310.08461
(forward KL on fixed text).

A mixture of experts is distilled from the model it was made of: first layer by layer, so that the experts of each
layer add what its feed-forward network added, then by the full distributions. A small loss spreads the tokens over the
experts (Switch Transformers, arXiv 2101.03961).
"""
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from playground.pocket.training.precision import mixed_precision, product_type
from playground.pocket.training.train import weighted

ON_DATA = 0.25                    # share of the budget before distillation starts
BY_LAYER = 0.6                    # share of the budget of a mixture in which its layers are distilled one by one
BALANCE = 0.02                    # weight of the loss that spreads the tokens over the experts


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


class ExpertsLoss(DraftLoss):
    """Loss of a mixture of experts that is distilled from the dense `target` it was made of."""

    def __init__(self, target, by_layer=BY_LAYER):
        super().__init__(target)
        self.by_layer, self.seen = by_layer, []
        for layer in self.target.model.layers:
            layer.mlp.register_forward_hook(lambda module, given, added: self.seen.append((given[0], added)))

    def __call__(self, sparse, batch, trainer):
        self.seen.clear()
        return self.layers(sparse, batch) if trainer.progress < self.by_layer else self.whole(sparse, batch)

    def layers(self, sparse, batch):
        """Mean over the layers of the relative squared error of the experts, on what the dense layers read."""
        with torch.no_grad():
            self.target.model(**batch.read)
        real, losses = batch.documents[:, :-1] > 0, []
        for layer, (read, added) in zip(sparse.model.layers, self.seen):
            rows, wanted = read[real].float(), added[real].float()
            with mixed_precision(rows.device):
                found, logits = layer.mlp(rows[None])[0], layer.mlp.gate(rows)[0]
            error = (found.float() - wanted).square().sum() / wanted.square().sum()
            losses.append(error + BALANCE * spread((logits.float(),), sparse.config))
        return sum(losses) / len(losses)

    def whole(self, sparse, batch):
        """Cross-entropy to the dense model's distributions."""
        _, weights = batch.predicted
        with mixed_precision(weights.device):
            out = sparse.model(**batch.read, output_router_logits=True)
            logits = sparse.lm_head(out.last_hidden_state)
        with torch.no_grad():
            wanted = self.target(**batch.read).logits.float().softmax(-1)
        return soft(logits, wanted, weights) + BALANCE * spread(out.router_logits, sparse.config)


def spread(router_logits, config):
    """Load balancing loss of the router logits of some layers: 1 if all experts are used alike."""
    active = config.num_experts_per_tok
    return load_balancing_loss_func(router_logits, config.num_local_experts, active) / active


def soft(logits, wanted, weights):
    """Weighted mean cross-entropy to target distributions, in nats. logits, wanted: (rows, tokens, vocabulary)."""
    losses = -(wanted * logits.float().log_softmax(-1)).sum(-1)
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)
