"""Training of FactorLLM's routers: a linear layer each, towards the experts whose outputs are nearest to the whole."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, silu

from playground.algorithms.adaptive_compute.policy_training import TextBatch, distillation, held_out_mean
from playground.algorithms.draft_heads.head_training import HeadTraining, trained
from playground.contract import LayerSteps
from playground.events import Note

EXPERTS, RUN = 4, 2  # of a layer, and of a token in the training
BALANCE = 0.01 / 0.05  # weight of the balance beside the router's loss, as in the paper
Projections = tuple[Tensor, Tensor, Tensor]
"""Gate and up [k, d], down [d, k]"""


def cut(projections: Projections) -> list[Projections]:
    """A feed-forward network in parts of consecutive channels; the last may be smaller."""
    gate, up, down = projections
    size = -(-len(gate) // EXPERTS)
    return [(gate[start:start + size], up[start:start + size], down[:, start:start + size])
            for start in range(0, EXPERTS * size, size)]


def scores(router: Tensor, normed: Tensor) -> Tensor:
    """Scores [..., experts] of a router [experts, d] for states [..., d]."""
    return normed @ router.T


def nearest_experts(outputs: Tensor, run: int = RUN) -> Tensor:
    """The paper's labels, 1 for each of the experts whose output alone is nearest to the whole one over experts/run.

    outputs: of all experts, [experts, ..., d]; the labels are [..., experts].
    """
    errors = (outputs - outputs.sum(0) * run / len(outputs)).square().mean(-1).movedim(0, -1)
    return torch.zeros_like(errors).scatter_(-1, errors.argsort(dim=-1, stable=True)[..., :run], 1.0)


def router_loss(found: Tensor, labels: Tensor) -> Tensor:
    """KL(softmax of the router's scores || softmax of the labels), the mean over states [n, experts]."""
    return kl_div(labels.log_softmax(-1), found.log_softmax(-1), log_target=True, reduction="batchmean")


def balance_loss(found: Tensor, run: int = RUN) -> Tensor:
    """Mean share of the choices times mean probability, summed over the experts; least when all are used alike."""
    chosen = torch.zeros_like(found).scatter_(-1, found.topk(run, -1).indices, 1.0)
    return (chosen.mean(0) * found.softmax(-1).mean(0)).sum()


class FactorRouters(nn.Module):
    """A router for each layer, beside the experts, which are not trained."""

    def __init__(self, parts):
        super().__init__()
        self.router = nn.Parameter(0.02 * torch.randn(parts.depth, EXPERTS, parts.width))
        self.experts = [[tuple(weight.detach().clone().float() for weight in part)
                         for part in cut(parts.ffn_projections(layer))] for layer in range(parts.depth)]

    @torch.no_grad()
    def outputs(self, layer: int, normed: Tensor) -> Tensor:
        """What each expert adds, [experts, ..., d]."""
        return torch.stack([(silu(normed @ gate.T) * (normed @ up.T)) @ down.T
                            for gate, up, down in self.experts[layer]])


class WholeNetworks(LayerSteps):
    """The model as it is, beside which the routers are judged on its own states."""

    def __init__(self, routers: FactorRouters, real: Tensor):
        self._routers, self._real, self.losses = routers, real, []

    def feed_forward(self, layer, normed, own):
        rows = normed[self._real].detach()
        found = scores(self._routers.router[layer], rows)
        labels = nearest_experts(self._routers.outputs(layer, rows))
        self.losses.append(torch.stack([router_loss(found, labels), BALANCE * balance_loss(found)]))
        return own(normed)


class SomeExperts(LayerSteps):
    """Two experts for each token, by these scores of states in a layer."""

    def __init__(self, routers: FactorRouters, score: Callable[[int, Tensor, Tensor], Tensor]):
        self._routers, self._score = routers, score

    def feed_forward(self, layer, normed, own):
        outputs = self._routers.outputs(layer, normed)
        best = self._score(layer, normed, outputs).topk(RUN, -1).indices
        chosen = torch.zeros(*normed.shape[:-1], EXPERTS).scatter_(-1, best, 1.0)
        return EXPERTS / RUN * (outputs * chosen.movedim(-1, 0)[..., None]).sum(0)


def train_routers(texts) -> Iterator:
    """Yields figures and a note; returns the weights by name."""
    routers = FactorRouters(texts.parts)
    steps = HeadTraining(epochs=1, rate=5e-3, names=("router", "balance"))
    yield from trained(routers, texts.phase("routers"), partial(losses, texts, routers), steps)
    found = {way: float(held_out_mean(texts, partial(_divergence, texts, SomeExperts(routers, score))))
             for way, score in _ways(routers).items()}
    yield Note("KL divergence from the model on held-out texts with 2 of 4 experts, in nats per token: " + ", ".join(
        f"{value:.3f} {way}" for way, value in found.items()) + ".")
    return {"router": routers.router.detach().half()}


def losses(texts, routers: FactorRouters, batch: TextBatch) -> list[Tensor]:
    """Of router and balance, averaged over layers."""
    steps = WholeNetworks(routers, batch.real)
    texts.forward(batch.ids, steps)
    return list(torch.stack(steps.losses).mean(0))


def _ways(routers: FactorRouters) -> dict[str, Callable[[int, Tensor, Tensor], Tensor]]:
    chance = torch.Generator().manual_seed(0)
    return {"by the routers": lambda layer, normed, outputs: scores(routers.router[layer], normed),
            "by the labels": lambda layer, normed, outputs: nearest_experts(outputs),
            "at random": lambda layer, normed, outputs: torch.rand(*normed.shape[:-1], EXPERTS, generator=chance)}


def _divergence(texts, steps: SomeExperts, batch: TextBatch) -> Tensor:
    return distillation(texts, batch, steps)
