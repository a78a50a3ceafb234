"""Tail-free against the library or its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse

from playground.contract import Sampler, find
from playground.contract.lane_config import LaneConfig
from support.laws import AT_ONE
from support.plain_rows import AT_TEMPERATURE_ONE, REMOVED, Row, V, alive, kept, rows, softmax
from support.wrong_variants import refused

TailFree = find("tail_free")
COLLAPSES = {"tail_free": [Collapse(LaneConfig("greedy", {}, [("tail_free", {"z": 1.0}), AT_ONE]), AT_TEMPERATURE_ONE)]}


def before_the_tail(row: Row, z: float) -> set[int]:
    """Sorted probabilities, first and second differences, and the sum of the latter's share up to each token."""
    p = softmax(row)
    order = sorted(range(V), key=lambda token: (-p[token], token))
    first = [p[order[i + 1]] - p[order[i]] for i in range(V - 1)]
    second = [abs(first[i + 1] - first[i]) for i in range(V - 2)]
    if z >= 1 or sum(second) == 0:
        return alive(row, set(order))
    found, so_far = {order[0]}, 0.0
    for i, bend in enumerate(second):
        so_far += bend
        if so_far > z * sum(second):
            break
        found.add(order[i + 1])
    return alive(row, found)


def check_tail_free(cls: type[Sampler]) -> None:
    for z in (0.0, 0.25, 0.6, 0.95, 1.0):
        assert kept(cls(z=z)) == [before_the_tail(row, z) for row in rows().tolist()], z


class FirstDifferences(TailFree):
    def apply(self, scores, histories):
        p, order = scores.softmax(-1).sort(descending=True, stable=True)
        fall = p.diff().abs()
        tail = torch.zeros_like(p, dtype=torch.bool)
        tail[:, 1:] = fall.cumsum(-1) > self.z * fall.sum(-1, keepdim=True)
        return scores.masked_fill(tail.scatter(-1, order, tail.clone()), REMOVED)


class OneTokenFurther(TailFree):
    """Keeps one token behind the bend."""

    def apply(self, scores, histories):
        order = scores.argsort(descending=True, stable=True)
        left = (super().apply(scores, histories) > REMOVED).gather(-1, order)
        left = torch.cat([torch.ones_like(left[:, :1]), left[:, :-1]], -1)
        return scores.masked_fill(~left.scatter(-1, order, left.clone()), REMOVED)


@pytest.mark.oracle("tail_free")
def test_tail_free_sampling_ends_where_the_curve_has_become_flat():
    check_tail_free(TailFree)


@pytest.mark.refuses("tail_free")
@pytest.mark.parametrize("wrong", [FirstDifferences, OneTokenFurther])
def test_a_wrong_tail_is_refused(wrong):
    refused(check_tail_free, wrong)
