"""Classifier-free guidance against its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from pairs import pair
from registry import Collapse
from runs import alone
from torch import Tensor
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.modeling_outputs import CausalLMOutput

from playground.contract import Sampler, find
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from support.guided_rows import drawn
from support.wrong_variants import refused

CFG = find("cfg")
GREEDY = LaneConfig("greedy")
COLLAPSES = {"cfg": [Collapse(alone("cfg", scale=1.0), GREEDY)]}


class Recorded:
    """A model for the library's processor that answers with given logits."""

    def __init__(self, logits: Tensor):
        self.logits = logits

    def __call__(self, *inputs, **settings):
        return CausalLMOutput(logits=self.logits[None, None])


def check_cfg(cls: type[Sampler]) -> None:
    rows = {"target": drawn(0), "negative": drawn(1)}
    for scale in (0.0, 1.5, 4.0):
        found = cls(scale=scale).mix(rows)
        for row, given, without in zip(found, *rows.values()):
            library = UnbatchedClassifierFreeGuidanceLogitsProcessor(scale, Recorded(without), use_cache=False)
            expected = library(torch.tensor([[0]]), given[None])[0]
            assert torch.allclose(row.softmax(-1), expected.softmax(-1))


class GuidesTheOtherWay(CFG):
    def mix(self, rows):
        return super().mix({"target": rows["negative"], "negative": rows["target"]})


class CountsFromThePrompted(CFG):
    """(1 + scale) p - scale n: the guidance of another convention."""

    def mix(self, rows):
        return (1 + self.scale) * rows["target"] - self.scale * rows["negative"]


@pytest.mark.oracle("cfg")
def test_guidance_is_the_librarys():
    check_cfg(CFG)


@pytest.mark.refuses("cfg")
@pytest.mark.parametrize("wrong", [GuidesTheOtherWay, CountsFromThePrompted])
def test_a_wrong_guidance_is_refused(wrong):
    refused(check_cfg, wrong)


def test_without_a_negative_prompt_the_other_stream_reads_the_last_token_alone():
    def prompt_of_the_other(**knobs) -> str:
        session = prepare(pair(), [alone("cfg", **knobs)], Prompt("The green bird"), Limits(0, 2))
        runner = session._runners[0]
        return "".join(map(runner.lane.piece, runner.lane.prompts["negative"]))

    whole = prompt_of_the_other(negative="Be dull.")
    assert "Be dull." in whole and whole.endswith("The green bird")
    assert 0 < len(prompt_of_the_other()) < len("green bird") and "The green bird".endswith(prompt_of_the_other())
