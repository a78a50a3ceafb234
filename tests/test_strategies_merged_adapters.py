"""Averaged adapters: the mean of products, which is not the product of means."""
from __future__ import annotations

import pytest

from playground.contract import find
from support.routed_adapters import check_text, evenly

MERGED = find("merged_adapters")


class AveragesTheFactors(MERGED):
    """Mean B times mean A."""

    def prepare(self):
        self.adapters = [{name: own._replace(a=own.a.mean(0, keepdim=True).expand_as(own.a),
                                             b=own.b.mean(0, keepdim=True).expand_as(own.b))
                          for name, own in layer.items()} for layer in self.adapters]


@pytest.mark.oracle("merged_adapters")
def test_the_text_is_that_of_a_network_with_dense_products_for_every_row(monkeypatch):
    check_text(MERGED, evenly, monkeypatch)


@pytest.mark.refuses("merged_adapters")
@pytest.mark.parametrize("wrong", [AveragesTheFactors])
def test_that_network_refuses_other_weights(wrong, monkeypatch):
    with pytest.raises(AssertionError):
        check_text(wrong, evenly, monkeypatch)
