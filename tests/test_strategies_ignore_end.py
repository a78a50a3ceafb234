"""Ignore end of text against the library or its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from transformers import SuppressTokensLogitsProcessor

from playground.contract import Sampler, find
from support.processed_rows import END, begun, by_the_library, histories, rows
from support.wrong_variants import refused


def check_ignore_end(cls: type[Sampler]) -> None:
    expected = by_the_library(lambda history: SuppressTokensLogitsProcessor([END]))
    assert torch.equal(begun(cls()).apply(rows(), histories()), expected)


class StopsIgnoring(find("ignore_end")):
    """Wrong: after three tokens the text may end."""

    def apply(self, scores, histories):
        changed = super().apply(scores, histories)
        return torch.stack([new if len(history) < 3 else old for new, old, history in zip(changed, scores, histories)])


@pytest.mark.oracle("ignore_end")
def test_the_end_is_removed_from_every_row():
    check_ignore_end(find("ignore_end"))


@pytest.mark.refuses("ignore_end")
def test_an_end_that_returns_is_refused():
    refused(check_ignore_end, StopsIgnoring)
