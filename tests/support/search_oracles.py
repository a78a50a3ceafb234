"""Samples whose scores are known."""
from __future__ import annotations

from collections.abc import Callable

import pytest
from tables import TableModel, Text

from playground.contract import Decoder, find
from playground.contract.lane_config import Assembly

BeamSearch, BestOfN, FirstFinish, Labels, MBR, SelfConsistency, Superposed = (
    find(name)
    for name in (
        "beam_search",
        "best_of_n",
        "first_finish",
        "gencls_ppl",
        "mbr",
        "self_consistency",
        "superposed",
    )
)
PROMPT = [0, 1]


def refused(check: Callable, wrong: type[Decoder]) -> None:
    with pytest.raises(AssertionError) as found:
        check(wrong)
    assert "Failed(" not in str(found.value), "a variant that breaks off proves nothing"


def lane_of(decoder: Decoder) -> Assembly:
    return Assembly(decoder, decoder.toggles())


def logp(model: TableModel, text: Text, prompt: list[int] = PROMPT) -> float:
    """Log-probability of a text after the prompt, by the chain rule, before any temperature."""
    rows = [model.scores((*prompt, *text[:i])).log_softmax(-1) for i in range(len(text))]
    return sum(float(row[token]) for row, token in zip(rows, text))
