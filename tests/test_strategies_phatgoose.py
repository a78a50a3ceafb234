"""PHATGOOSE: a token goes to the adapters whose gates fit its input best."""
from __future__ import annotations

import pytest
import torch

from playground.contract import find
from support.routed_adapters import by_gate, check_text

PHATGOOSE = find("phatgoose")


class GatesByTheSigmoid(PHATGOOSE):
    """The gate as it is trained, used as the weight."""

    def weigh(self, layer, name, rows):
        return torch.sigmoid(rows.float() @ self.adapters[layer][name].gate.float().T)


class RawInputs(PHATGOOSE):
    def weigh(self, layer, name, rows):
        return super().weigh(layer, name, rows.cumsum(-1))


@pytest.mark.oracle("phatgoose")
def test_the_text_is_that_of_a_network_with_dense_products_for_every_row(monkeypatch):
    check_text(PHATGOOSE, by_gate, monkeypatch)


@pytest.mark.refuses("phatgoose")
@pytest.mark.parametrize("wrong", [GatesByTheSigmoid, RawInputs])
def test_that_network_refuses_other_weights(wrong, monkeypatch):
    with pytest.raises(AssertionError):
        check_text(wrong, by_gate, monkeypatch)
