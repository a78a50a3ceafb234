"""Cache policies that act on what a row attends to: against attention written out over the whole text."""
from __future__ import annotations

import pytest

from playground.contract import make
from playground.contract.assembly import Assembly
from support.budget_policies import ROW_WISE
from support.eviction import Wrong, alone, course, models


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("name, knobs", ROW_WISE.items(), ids=ROW_WISE)
def test_per_row_selection_supports_draft_trees(name, knobs, architecture):
    plain = course(alone(make(name, **knobs)), models(architecture))[0]
    for drafter in (make("draft_model", width=2, depth=3), make("prompt_lookup"), Wrong()):
        decoder = make("speculative", verifier="greedy_match")
        decoder.drafter = drafter
        assembly = Assembly(decoder, cache_policy=make(name, **knobs))
        assert course(assembly, models(architecture))[0] == plain
        assert "greedy_identical" in assembly.guarantee()
    assert plain != course(Assembly(make("greedy")), models(architecture))[0]
