"""AdaCAD against its law by hand, and wrong variants against the same check."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from registry import Collapse
from runs import alone, divergence, figures, random_rows, run, written
from tables import TableModel
from torch import Tensor

from playground.contract import Sampler, make
from playground.contract.lane_config import LaneConfig
from playground.engine.sampling import jensen_shannon
from playground.events import Note
from support.contrast_oracles import AdaCAD, SwapsTheStreams, amplified
from support.contrasting import LN2, Reads, mixed_text
from support.wrong_variants import refused


def check_adacad(cls: type[Sampler]) -> None:
    amplified(cls, divergence)
    amplified(cls, lambda p, q: divergence(p, q) / math.log(2), base="2")
    amplified(cls, lambda p, q: max(divergence(p, q), 0.3), floor=0.3)


class SwappedAdaCAD(SwapsTheStreams, AdaCAD): ...


class DistanceForDivergence(AdaCAD):
    def _alpha(self, rows):
        return super()._alpha(rows).sqrt()


class FloorAsCeiling(AdaCAD):
    def _alpha(self, rows):
        floor, self.floor = self.floor, 0.0
        return super()._alpha(rows).clamp(max=floor or math.inf)


class OneStrengthForAll(AdaCAD):
    """Takes the mean divergence of a batch for that of each row."""

    def _alpha(self, rows):
        return super()._alpha(rows).mean().expand(len(rows["target"]))


@pytest.mark.oracle("adacad")
def test_adacad_amplifies_each_row_by_its_own_divergence():
    check_adacad(AdaCAD)


@pytest.mark.refuses("adacad")
@pytest.mark.parametrize("wrong", [SwappedAdaCAD, DistanceForDivergence, FloorAsCeiling, OneStrengthForAll])
def test_a_wrong_adacad_is_refused(wrong):
    refused(check_adacad, wrong)


GREEDY = LaneConfig("greedy")
COLLAPSES = {
    "adacad": [
        Collapse(alone("adacad", floor=1.0), alone("cad", alpha=1.0)),
        Collapse(alone("adacad", floor=0.7), alone("cad", alpha=0.7)),
        Collapse(alone("adacad", floor=1.0, base="2"), alone("cad", alpha=1.0)),
    ],
}


# --- CAD and AdaCAD: rows by hand ---

def test_adacads_alpha_is_the_divergence_of_each_row_in_the_chosen_base_with_a_floor():
    z = {"target": random_rows(6), "without_context": random_rows(7)}
    nats = jensen_shannon(*z.values())
    for knobs, alpha in [({}, nats), ({"base": "2"}, nats / LN2), ({"floor": 0.5}, nats.clamp(min=0.5))]:
        expected = torch.stack([(1 + a) * one - a * two for a, one, two in zip(alpha, *z.values())])
        assert torch.allclose(make("adacad", **knobs).mix(z), expected)


# --- whole texts: both streams are recomputed from the beginning for every token ---

def jsd(z1: Tensor, z2: Tensor) -> float:
    return float(jensen_shannon(z1, z2))


FAULTS: dict[str, Callable[[Reads, list[int], list[int]], list[int]]] = {
    "swapped streams": lambda reads, a, b: mixed_text(reads, (b, a), 12, jsd),
    "the distance, which is the root of the divergence": lambda reads, a, b: mixed_text(
        reads, (a, b), 12, lambda z1, z2: jsd(z1, z2) ** 0.5
    ),
    "the contrast the other way round": lambda reads, a, b: mixed_text(reads, (a, b), 12, lambda z1, z2: -jsd(z1, z2)),
    "a second stream that never hears what was written": lambda reads, a, b: mixed_text(
        lambda text: reads(b) if text[: len(a)] != a else reads(text), (a, b), 12, jsd
    ),
}


@pytest.mark.refuses("adacad")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_faulty_contrast_changes_the_text(fault):
    differ = []
    for seed in range(6):
        model = TableModel("abcde", seed=seed)
        found = written(alone("adacad"), {"target": model}, [0, 1, 2, 3], 12, other=[3])
        assert found == mixed_text(lambda text, model=model: model.scores(tuple(text)), ([0, 1, 2, 3], [3]), 12, jsd)
        differ.append(found != fault(lambda text, model=model: model.scores(tuple(text)), [0, 1, 2, 3], [3]))
    assert sum(differ) >= 3


def test_a_context_overrides_memory_and_the_reader_is_informed():
    def rule(context):  # memory says b; the context, an a at the beginning, makes c nearly as likely
        return torch.tensor([-9.0, 2.0, 1.6] if context[0] == 0 else [-9.0, 3.0, -4.0], dtype=torch.float64)

    model = TableModel("abc", rule=rule)
    assert run(GREEDY, {"target": model}, [0, 1], 2)[0].text == "bb"
    lane, events = run(alone("adacad"), {"target": model}, [0, 1], 2, other=[1])
    assert lane.text == "cc"
    assert len([event for event in events if isinstance(event, Note)]) == 2
    chances = figures(events, "probability of the chosen token")[1]
    assert (
        chances["x"] == 1
        and chances["series"]["adjusted"] > 0.5 > chances["series"]["with context"] > chances["series"]["without"]
    )
    assert not figures(events, "where context and memory disagree")  # both streams put b first
