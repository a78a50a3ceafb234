"""Acceptance heads and the texts they are trained on."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from playground.algorithms.speculative.acceptance_head import AcceptanceHead
from playground.contract import find
from playground.decoding import fitted_weights as fitted
from playground.decoding.models import Models
from playground.events import Draft
from support.speculation import speculative_lane
from support.speculative_runs import of, recorded

NAME = "specdec_plus_plus"
SpecDec = find(NAME)


@pytest.fixture
def alone(home, monkeypatch) -> Path:
    """An empty folder for locally trained heads, without the bundled ones."""
    monkeypatch.setattr(fitted, "BUNDLED_FITTED", home / "none")
    return home


def streams(models: Models) -> dict:
    return {"target": models.target, "draft": models.draft}


def keep(models: dict, weights: dict[str, Tensor], best: dict[str, Tensor] | None = None) -> None:
    """Weights of the head for drawn tokens, and of that for best ones, where it is another."""
    fitted.save(fitted.local_path(NAME, models), both(weights, best), models)


def both(weights: dict[str, Tensor], best: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    return {
        f"{rule}.{name}": tensor
        for rule, head in (("drawn", weights), ("best", best or weights))
        for name, tensor in head.items()
    }


def random_head(width: int, bias: float = 0.0, scale: float = 1.0) -> dict[str, Tensor]:
    """An untrained head with high predictions."""
    head = AcceptanceHead(width, 2, torch.Generator().manual_seed(5))
    for i, weights in enumerate(head.parameters()):
        torch.nn.init.normal_(weights, std=scale, generator=torch.Generator().manual_seed(i))
    head.read.bias.data = torch.tensor([0.0, bias])
    return head.requires_grad_(False).state_dict()


def with_head(*samplers, verifier: str = "rejection", **knobs):
    return speculative_lane(NAME, verifier, *samplers, predictor="head", **knobs)


def drafts(lane) -> list[Draft]:
    return of(Draft, recorded(lane)[1])


class Watched(SpecDec):
    """Records the prediction for each tested draft token, and the outcome."""

    def __post_init__(self):
        super().__post_init__()
        self.noted = []

    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, verdict)
        self.noted += [
            (self._predicted[test.node], float(test.kept)) for test in verdict.tests if test.node in self._predicted
        ]
