"""DExperts, prompted against the library or its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import pytest
from registry import Collapse
from runs import alone

from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from support.guided_rows import Row, V, drawn, softmax
from support.wrong_variants import refused

DExperts = find("dexperts")
GREEDY = LaneConfig("greedy")
COLLAPSES = {"dexperts": [Collapse(alone("dexperts", alpha=0.0), GREEDY), Collapse(alone("dexperts", p=0.0), GREEDY)]}


def nucleus(p: Row, share: float) -> set[int]:
    order, total, found = sorted(range(len(p)), key=lambda t: -p[t]), 0.0, set()
    for token in order:
        found.add(token)
        total += p[token]
        if total >= share:
            break
    return found


def check_dexperts(cls: type[Sampler]) -> None:
    rows = {"target": drawn(0), "expert": drawn(1), "anti_expert": drawn(2)}
    for alpha, share in ((1.0, 0.9), (2.5, 0.5), (-1.0, 1.0)):
        found = cls(alpha=alpha, p=share).mix(rows).softmax(-1)
        for row, base, good, bad in zip(found.tolist(), *(r.tolist() for r in rows.values())):
            p, q, r = softmax(base), softmax(good), softmax(bad)
            weights = [p[t] * (q[t] / r[t]) ** alpha if t in nucleus(p, share) else 0.0 for t in range(V)]
            assert row == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-9)


class WithoutTheBase(DExperts):
    def mix(self, rows):
        return super().mix(rows) - rows["target"]


class NucleusOfTheResult(DExperts):
    def mix(self, rows):
        steered = rows["target"] + self.alpha * (rows["expert"] - rows["anti_expert"])
        return make("top_p", p=self.p).apply(steered, [])


class SwapsTheExperts(DExperts):
    def mix(self, rows):
        return super().mix(rows | {"expert": rows["anti_expert"], "anti_expert": rows["expert"]})


@pytest.mark.oracle("dexperts")
def test_dexperts_multiplies_by_the_ratio_of_the_experts_in_the_nucleus_of_the_model():
    check_dexperts(DExperts)


@pytest.mark.refuses("dexperts")
@pytest.mark.parametrize("wrong", [WithoutTheBase, NucleusOfTheResult, SwapsTheExperts])
def test_wrong_experts_are_refused(wrong):
    refused(check_dexperts, wrong)
