"""What changed weights cost and what they lose, against the loaded model, on held-out texts."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from playground.engine.weights.linear_blocks import UNCHANGED_BITS, linear_layers, read_by


def weight_report(original: PreTrainedModel, changed: PreTrainedModel, bits: Mapping[str, float],
                  texts: list[list[int]]) -> dict[str, Any]:
    """Sizes and losses as plain data. `bits` are those of each changed weight, by layer; `texts` are held out.

    bytes: of all parameters as they could be stored, those that no change touches in 16 bits.
    """
    before, after = linear_layers(original), linear_layers(changed)
    sizes = {name: layer.weight.numel() for name, layer in after.items()}
    taken = sum(sizes[name] * bits.get(name, UNCHANGED_BITS) for name in sizes)
    rest = sum(weight.numel() for weight in changed.parameters()) - sum(sizes.values())
    errors = layer_errors(original, changed, texts)
    layers = {name: {"error": errors.get(name, 0.0), "bits": bits.get(name, UNCHANGED_BITS),
                     "zeros": float((layer.weight == 0).float().mean()),
                     "same": torch.equal(layer.weight, before[name].weight)} for name, layer in after.items()}
    return {"bits per weight": taken / sum(sizes.values()), "bytes": round((taken + rest * UNCHANGED_BITS) / 8),
            "bytes before": round((sum(sizes.values()) + rest) * UNCHANGED_BITS / 8),
            **losses(original, changed, texts), "layers": layers}


@torch.inference_mode()
def layer_errors(original: PreTrainedModel, changed: PreTrainedModel, texts: list[list[int]]) -> dict[str, float]:
    """||W x - W' x|| / ||W x|| of each layer over all inputs x that the original network gives it, by name."""
    before, after = linear_layers(original), linear_layers(changed)
    lost, whole = dict.fromkeys(before, 0.0), dict.fromkeys(before, 0.0)
    with read_by(iter(before.values())) as seen:
        for ids in texts:
            original.base_model(input_ids=_batch(original, ids), use_cache=False)
            for name, layer in before.items():
                for inputs in seen.pop(id(layer), []):
                    old = inputs.float() @ layer.weight.float().T
                    lost[name] += float((inputs.float() @ after[name].weight.float().T - old).square().sum())
                    whole[name] += float(old.square().sum())
    return {name: (lost[name] / whole[name]) ** 0.5 for name in before if whole[name]}


@torch.inference_mode()
def losses(original: PreTrainedModel, changed: PreTrainedModel, texts: list[list[int]]) -> dict[str, float]:
    """Divergence KL(original || changed) of the next token in nats, its mean and 95th percentile over all tokens, the
    perplexity of both networks, and how often their most probable tokens agree.
    """
    kl, agree, nll = [], [], ([], [])
    for ids in texts:
        p, q = (_log_probabilities(network, ids) for network in (original, changed))
        kl.append((p.exp() * (p - q)).sum(-1))
        agree.append(p.argmax(-1) == q.argmax(-1))
        following = torch.tensor(ids[1:], device=p.device)[:, None]
        for own, logs in zip(nll, (p, q)):
            own.append(-logs[:-1].gather(-1, following)[:, 0])
    all_kl = torch.cat(kl)
    before, after = (float(torch.cat(own).mean().exp()) for own in nll)
    return {"KL": float(all_kl.mean()), "KL 95 %": float(all_kl.quantile(0.95)), "perplexity": after,
            "perplexity before": before, "same top token": float(torch.cat(agree).float().mean()),
            "tokens": len(all_kl)}


def _log_probabilities(network: PreTrainedModel, ids: list[int]) -> Tensor:
    """Of the token after each of these, [n, V], in float32."""
    return network(input_ids=_batch(network, ids), use_cache=False).logits[0].float().log_softmax(-1)


def _batch(network: PreTrainedModel, ids: list[int]) -> Tensor:
    return torch.tensor([ids], device=network.device)
