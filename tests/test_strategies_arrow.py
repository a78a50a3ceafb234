"""Arrow: a token goes to the adapters whose first right singular vectors fit its input best."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from playground.algorithms.adaptive_compute.adapter_experts import MATRICES
from playground.contract import find
from support.compute_runs import deep
from support.routed_adapters import NAMES, SHAPES, by_direction, check_text, experts_at_random

ARROW = find("arrow")


class SignedScores(ARROW):
    def weigh(self, layer, name, rows):
        vectors = self._vectors[layer][name]
        return ARROW.weigh.__globals__["top_softmax"](rows.float() @ vectors.T, self.k, self.temperature)


class DirectionsOfA(ARROW):
    """The first right singular vector of A alone."""

    def prepare(self):
        super().prepare()
        self._vectors = [{name: torch.linalg.svd(own.a.float()).Vh[:, 0] for name, own in layer.items()}
                         for layer in self.adapters]


@pytest.mark.oracle("arrow")
def test_the_text_is_that_of_a_network_with_dense_products_for_every_row(monkeypatch):
    check_text(ARROW, by_direction, monkeypatch)


@pytest.mark.refuses("arrow")
@pytest.mark.parametrize("wrong", [SignedScores, DirectionsOfA])
def test_that_network_refuses_other_weights(wrong, monkeypatch):
    with pytest.raises(AssertionError):
        check_text(wrong, by_direction, monkeypatch)


def peft_arrow(weights: dict, matrix: str, layer: int, rows: Tensor, count: int) -> Tensor:
    """What peft's own Arrow layer adds."""
    peft = pytest.importorskip("peft")
    arrow = pytest.importorskip("peft.tuners.lora.arrow")
    config = peft.ArrowConfig(top_k=count, router_temperature=1.0)
    config.task_adapter_names, config.gks_adapter_names = list(NAMES), []
    factors: tuple[nn.ModuleDict, nn.ModuleDict] = (nn.ModuleDict(), nn.ModuleDict())
    for name in NAMES:
        for table, part in zip(factors, ("a", "b")):
            table[name] = nn.Linear(1, 1, bias=False)
            table[name].weight = nn.Parameter(weights[f"{name}.{matrix}.{part}"][layer].float(), requires_grad=False)
    router = arrow.ArrowLoraLinearLayer(rows.shape[-1], config)
    router.top_right_singular_vec_from_BA = (
        lambda a, b, own=router.top_right_singular_vec_from_BA: own(a, b, iters=2000))  # until it converges
    router.build_prototypes(*factors)
    return router(rows.float()[None], *factors, nn.Identity(), dict.fromkeys(NAMES, 1.0))[0]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("matrix", MATRICES)
def test_arrow_adds_what_pefts_arrow_layer_adds(matrix, count, monkeypatch):
    weights = experts_at_random()
    policy = ARROW(k=count)
    policy.begin(deep().parts, weights)
    rows = torch.randn(9, SHAPES[matrix][1], generator=torch.Generator().manual_seed(1), dtype=torch.double)
    for layer in (0, 5):
        added = policy.adapters[layer][matrix].added(rows, policy.mixed(layer, matrix, rows))
        assert torch.allclose(added.float(), peft_arrow(weights, matrix, layer, rows, count), atol=1e-4)
