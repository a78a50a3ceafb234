"""Minimum new tokens against the library or its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from runs import alone
from transformers import MinNewTokensLengthLogitsProcessor

from playground.contract import Sampler, find
from playground.contract.lane_config import LaneConfig
from support.processed_rows import END, begun, by_the_library, histories, rows
from support.wrong_variants import refused

GREEDY = LaneConfig("greedy")
COLLAPSES = {"min_new_tokens": [Collapse(alone("min_new_tokens", count=0), GREEDY)]}


def check_min_new_tokens(cls: type[Sampler]) -> None:
    for start, count in ((1, 3), (2, 1), (3, 6)):
        library = MinNewTokensLengthLogitsProcessor(start, count, END)
        expected = by_the_library(lambda history, library=library: library)
        assert torch.equal(begun(cls(count=count), start).apply(rows(), histories()), expected)


class CountsThePrompt(find("min_new_tokens")):
    def begin(self, start, piece, end_ids=frozenset()):
        super().begin(0, piece, end_ids)


class OneTokenMore(find("min_new_tokens")):
    def __post_init__(self):
        self.count += 1


@pytest.mark.oracle("min_new_tokens")
def test_the_end_is_removed_as_long_as_the_library_removes_it():
    check_min_new_tokens(find("min_new_tokens"))


@pytest.mark.refuses("min_new_tokens")
@pytest.mark.parametrize("wrong", [CountsThePrompt, OneTokenMore])
def test_a_wrong_minimum_is_refused(wrong):
    refused(check_min_new_tokens, wrong)
