"""Lazy layers (SimLayerKV): what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest

from playground.contract import find
from support.budget_policies import roomy
from support.window_votes import HEADS, SLOTS, WINDOW, received, stays
from support.wrong_variants import refused

SimLayerKV = find("sim_layer_kv")
COLLAPSES = {"sim_layer_kv": roomy("sim_layer_kv", threshold=1.0)}


def check_lazy(cls: type) -> None:
    for seed in range(8):
        for sinks, recent, threshold in ((2, 4, 0.3), (0, 6, 0.5), (4, 3, 0.9)):
            near = {p for p in range(SLOTS) if p < sinks or p >= SLOTS - recent}
            rows = [row for head in received(seed).tolist() for row in head]
            lazy = sum(row[p] for row in rows for p in near) / len(rows) > threshold
            policy = cls(sinks=sinks, recent=recent, window=WINDOW, threshold=threshold)
            assert stays(policy, seed) == [near if lazy else set(range(SLOTS))] * HEADS


class KeepsLazyLayers(SimLayerKV):
    def is_lazy(self, layer):
        return not super().is_lazy(layer)


class ForgetsTheSinks(SimLayerKV):
    def _share(self, held):
        sinks, self.sinks = self.sinks, 0
        found = super()._share(held)
        self.sinks = sinks
        return found


@pytest.mark.oracle("sim_layer_kv")
def test_a_layer_that_looks_at_its_ends_keeps_only_those():
    check_lazy(SimLayerKV)


@pytest.mark.refuses("sim_layer_kv")
@pytest.mark.parametrize("wrong", [KeepsLazyLayers, ForgetsTheSinks])
def test_a_wrong_laziness_is_refused(wrong):
    refused(check_lazy, wrong)
