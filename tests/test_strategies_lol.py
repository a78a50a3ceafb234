"""LOL, prompt amateur against its law by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest
from registry import Collapse
from runs import alone, random_rows

from playground.algorithms.sampling import contrastive
from playground.contract import EarlyExit, Sampler, make
from playground.contract.lane_config import LaneConfig
from support.contrast_oracles import LOL, check_contrasted, drawn, logs
from support.wrong_variants import refused


def check_lol(cls: type[Sampler]) -> None:
    """(1 + gamma) ln r - gamma ln p - ln a + omega (ln p_l - ln a_l), for the layer at a share of the depth."""
    for omega, gamma in ((0.5, 0.5), (2.0, -1.0), (0.0, 1.0)):
        lol = cls(omega=omega, gamma=gamma, layer=0.75)
        lol.inner(8, False)
        names = ["target", "refocused", "induced", EarlyExit("target", 6), EarlyExit("induced", 6)]
        rows = {EarlyExit(stream, layer): drawn(20 + layer) for stream in ("target", "induced") for layer in range(9)}
        rows |= {name: drawn(seed) for seed, name in enumerate(names)}
        scores = []
        for p, r, a, low_p, low_a in zip(*([logs(row) for row in rows[name].tolist()] for name in names)):
            columns = zip(p, r, a, low_p, low_a)
            scores.append([(1 + gamma) * r - gamma * p - a + omega * (lp - la) for p, r, a, lp, la in columns])
        check_contrasted(lol.mix(rows), rows["target"], scores, 0.1)


class OneLayerLower(LOL):
    def inner(self, depth, tied):
        return super().inner(depth - 2, tied)


class LowerLayerTheOtherWay(LOL):
    def _parts(self, rows):
        upper, lower = super()._parts(rows)
        return upper, -lower


class RefocusesThePrompt(LOL):
    """Amplifies the prompt's row against that with the instruction, the wrong way round."""

    def _parts(self, rows):
        return super()._parts(rows | {"target": rows["refocused"], "refocused": rows["target"]})


class CountsTheLowerLayerOnce(LOL):
    def mix(self, rows):
        self.omega = min(self.omega, 1.0)
        return super().mix(rows)


@pytest.mark.oracle("lol")
def test_lol_is_the_sum_of_its_three_contrasts():
    check_lol(LOL)


@pytest.mark.refuses("lol")
@pytest.mark.parametrize("wrong", [OneLayerLower, LowerLayerTheOtherWay, RefocusesThePrompt, CountsTheLowerLayerOnce])
def test_a_wrong_lol_is_refused(wrong):
    refused(check_lol, wrong)


GREEDY = LaneConfig("greedy")
COLLAPSES = {
    "lol": [
        Collapse(alone("lol", omega=0.0, gamma=-1.0), alone("icd")),
        Collapse(alone("lol", omega=0.0, gamma=-1.0, rho=0.3), alone("icd", rho=0.3)),
        Collapse(alone("lol", gamma=-1.0, layer=1.0), alone("icd")),
        Collapse(alone("lol", rho=1.0), GREEDY),
    ],
}


@pytest.mark.oracle("lol")
def test_lol_sums_the_last_layer_the_lower_layer_and_the_truthfulness_contrast():
    lol = make("lol", omega=0.5, gamma=0.5, layer=0.75)
    own, induced = lol.inner(8, True)
    assert (own, induced) == (EarlyExit("target", 6), EarlyExit("induced", 6))
    rows = {name: random_rows(seed) for seed, name in enumerate(["target", "induced", "refocused", own, induced])}
    p, a, r, pl, al = (rows[name].log_softmax(-1) for name in ["target", "induced", "refocused", own, induced])
    expected, kept = 1.5 * r - 0.5 * p - a + 0.5 * (pl - al), contrastive.plausible(rows["target"], 0.1)
    assert (lol.mix(rows) - expected)[kept].abs().max() < 1e-4
    for wrong in (1.5 * r - 0.5 * p - a, 1.5 * r - 0.5 * p - a + 0.5 * (al - pl), r - a + 0.5 * (pl - al)):
        assert (lol.mix(rows) - wrong)[kept].abs().max() > 0.1
