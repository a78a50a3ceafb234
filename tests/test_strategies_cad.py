"""Context-aware decoding: its formula, by hand, and wrong variants."""
from __future__ import annotations

import pytest
from registry import Collapse
from runs import CONTEXT, QUESTION, alone, figures, recorded, run
from tables import TableModel

from playground.contract import Sampler
from playground.contract.lane_config import LaneConfig
from playground.decoding.prompt import Prompt
from support.contrast_oracles import CAD, SwapsTheStreams, amplified
from support.wrong_variants import refused

GREEDY, MODEL = LaneConfig("greedy"), LaneConfig("greedy", {}, [("temperature", {"t": 1.0})])
COLLAPSES = {
    "cad": [
        Collapse(alone("cad", alpha=0.0), GREEDY),
        Collapse(LaneConfig("greedy", {}, [("cad", {"alpha": 0.0}), ("temperature", {"t": 1.0})]), MODEL),
    ],
}
ARCHITECTURES = ("llama", "gemma2", "gpt_neox", "qwen3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_alpha_minus_one_is_greedy_without_the_context_and_zero_is_greedy_with_it(architecture):
    given = Prompt(QUESTION, context=CONTEXT)
    without, with_context = (recorded(GREEDY, prompt, architecture)[0] for prompt in (Prompt(QUESTION), given))
    assert without != with_context
    assert recorded(alone("cad", alpha=-1.0), given, architecture)[0] == without
    assert recorded(alone("cad", alpha=0.0), given, architecture)[0] == with_context


def test_positions_with_different_argmaxes_are_marked():
    model = TableModel("abcde", seed=3)
    lane, events = run(alone("cad", alpha=0.0), {"target": model}, [0, 1, 2], 12, other=[2])
    marked = [data["spans"][0][0] for data in figures(events, "where context and memory disagree")]
    first = [
        [int(model.scores((*prompt, *lane.main.written[:place])).argmax()) for prompt in ([0, 1, 2], [2])]
        for place in range(12)
    ]
    assert marked == [place for place, (one, two) in enumerate(first) if one != two] and 0 < len(marked) < 12


def check_cad(cls: type[Sampler]) -> None:
    for alpha in (-1.0, -0.4, 0.0, 0.5, 2.0):
        amplified(cls, lambda p, q, alpha=alpha: alpha, alpha=alpha)


class SwappedCAD(SwapsTheStreams, CAD): ...


class Interpolates(CAD):
    def mix(self, rows):
        return (1 - self.alpha) * rows["target"] + self.alpha * rows["without_context"]


class ContrastsProbabilities(CAD):
    def mix(self, rows):
        p, q = (row.softmax(-1) for row in rows.values())
        return (p + self.alpha * (p - q)).clamp(min=1e-12).log()


@pytest.mark.oracle("cad")
def test_cad_amplifies_the_difference_of_two_rows():
    check_cad(CAD)


@pytest.mark.refuses("cad")
@pytest.mark.parametrize("wrong", [SwappedCAD, Interpolates, ContrastsProbabilities])
def test_a_wrong_cad_is_refused(wrong):
    refused(check_cad, wrong)
