"""Which experts of a mixture-of-experts model run, decided per forward by their rank in the router's order.

A router of the transformers library returns logits, gates and indices of the chosen experts. Its wrapper replaces the
gates and indices if the plan of the call asks for other ranks. Only routers that take the largest of softmaxed logits
are wrapped, which is checked for each of them; others, such as those with groups of experts, are left alone.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from playground.engine.host_copies import on_device

PROBE = 3  # rows of the check
USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


@dataclass
class ExpertRouting:
    """The experts of one forward: those of these ranks, 1 for the largest gate, or the router's own if there are none.

    `chosen` receives the indices [rows, experts] that each layer ran, in the order of the layers.
    """

    ranks: tuple[int, ...] = ()
    chosen: list[Tensor] = field(default_factory=list)

    def choose(self, router: nn.Module, logits: Tensor, gates: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gates and indices [rows, experts]."""
        if self.ranks:
            gates, indices = ranked(router, logits, self.ranks, gates.dtype)
        self.chosen.append(indices)
        return gates, indices


def ranked(router: nn.Module, logits: Tensor, ranks: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gates and indices of the experts of these ranks, normalised over them where the router normalises its own."""
    probabilities = logits.softmax(-1, dtype=torch.float32)
    places = on_device([rank - 1 for rank in ranks], logits.device)
    gates, indices = (part[:, places] for part in probabilities.topk(max(ranks), -1))
    if getattr(router, "norm_topk_prob", True):
        gates = gates / gates.sum(-1, keepdim=True)
    return gates.to(dtype), indices


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of the experts of a network: those that do not run for a token are not multiplied."""

    each: float = 0.0  # of one expert in every layer that has some, summed over the layers
    count: int = 0  # experts in a layer
    used: int = 0  # of them, how many the routers choose for a token

    def idle(self, ran: int | None = None) -> float:
        """Weights that a row is not multiplied with, if so many experts of a layer run for it; by default `used`."""
        return self.each * max(0, self.count - (ran or self.used))


def expert_weights(network: nn.Module) -> ExpertWeights:
    """The experts of a network, found by name; none if it has none, or if it does not say how many a token uses."""
    groups = [module.experts for module in network.modules() if isinstance(getattr(module, "experts", None), nn.Module)]
    used = _used(network)
    if not groups or not used:
        return ExpertWeights()
    count = _count(groups[0])
    total = sum(weight.numel() for experts in groups for weight in experts.parameters())
    return ExpertWeights(total / max(1, count), count, min(used, count))


def _used(network: nn.Module) -> int:
    """Experts a token uses, under any of the names that configurations have for it."""
    config = network.config.get_text_config()
    return next((int(getattr(config, name)) for name in USED if getattr(config, name, None)), 0)


def _count(experts: nn.Module) -> int:
    """Experts of a layer, which are modules in a list or slices of one tensor."""
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    return next((weight.shape[0] for weight in experts.parameters() if weight.dim() == 3), 0)


def install_routing(network: nn.Module, running: Callable[[], ExpertRouting | None]) -> int:
    """Wrap every router; returns how many experts each has, 0 if there is none that can be overridden.

    `running` returns the routing of the running forward, or None.
    """
    routers = [module for module in network.modules() if type(module).__name__.endswith("TopKRouter")]
    if not routers or not all(map(_follows_ranks, routers)):
        return 0
    for router in routers:
        router.forward = _routed(router, router.forward, running)
    return min(int(router.num_experts) for router in routers)


@torch.inference_mode()
def _follows_ranks(router: nn.Module) -> bool:
    """Whether the first ranks reproduce what the router chooses."""
    try:
        weight = router.weight
        hidden = torch.randn(PROBE, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
        logits, gates, indices = router(hidden)
        found, chosen = ranked(router, logits, tuple(range(1, int(router.top_k) + 1)), gates.dtype)
        return bool(torch.equal(chosen, indices)) and bool((found - gates).abs().max() < 1e-3)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # a router of another form
        return False


def _routed(router: nn.Module, forward: Callable, running: Callable[[], ExpertRouting | None]) -> Callable:
    def routed(*args: Any, **kwargs: Any) -> Any:
        out, routing = forward(*args, **kwargs), running()
        if routing is None:
            return out
        logits, gates, indices = out
        return (logits, *routing.choose(router, logits, gates, indices))

    return routed
