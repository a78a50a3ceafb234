"""LayerSkip: its draft tokens, their cost, and the unchanged distribution."""
from __future__ import annotations

import pytest
from tables import TableModel, distance, law, product_law

from playground.algorithms.speculative.speculative_loop import rounds
from playground.contract import Verifier, find, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.errors import Refusal
from playground.events import Verdict
from support.early_exits import EarlyTable
from support.laws import AT_ONE, EXACT


class BelievesItsFirstLayers(Verifier):
    """Accepts every draft token of a chain."""

    def judge(self, lm, tree, rows):
        return Verdict(kept=list(range(len(tree))), token=lm.pick(rows, len(tree) - 1).token)


class ChecksNothing(find("layer_skip")):
    def decode(self, lm):
        yield from rounds(lm, self.drafter, BelievesItsFirstLayers())


def check_layer_skip(preset: type) -> None:
    """The distribution of three tokens is the full model's."""
    assembly = assemble(LaneConfig("layer_skip", {}, [AT_ONE]))
    assembly.decoder = preset(make("layer_skip_draft", depth=2), make("rejection"))
    found = law(assembly, {"target": EarlyTable("ab")}, [0, 1, 0], 3)
    assert distance(found, product_law(TableModel("ab"), [0, 1, 0], 3)) < EXACT


@pytest.mark.oracle("layer_skip")
def test_layer_skip_keeps_the_full_models_distribution():
    check_layer_skip(find("layer_skip"))


@pytest.mark.refuses("layer_skip")
def test_layer_skip_without_verification_has_another_distribution():
    with pytest.raises(AssertionError, match="distance"):
        check_layer_skip(ChecksNothing)


def test_another_drafter_is_refused_with_layer_skip():
    with pytest.raises(Refusal, match=r"for Draft model choose Speculative decoding\.$"):
        assemble(LaneConfig("layer_skip", {}, [("draft_model", {})]))
