"""Prompt compression in chunks, with budgets that heads share, and of lazy layers, against rules written by hand."""
from __future__ import annotations

import pytest

from playground.contract import find
from support.eviction import PROMPT, alone, course, models
from support.window_votes import KEYS

ChunkKV, AdaKV, ComposedKV, SimLayerKV = map(find, ("chunk_kv", "ada_kv", "composed_kv", "sim_layer_kv"))
KEYS[1] += 3 * KEYS[1, :1]  # keys of this head resemble each other


@pytest.mark.strategy("chunk_kv", "ada_kv", "composed_kv", "sim_layer_kv")
@pytest.mark.parametrize("policy, bound", [
    (ChunkKV(window=3, capacity=12, chunk=3), 12), (AdaKV(window=3, capacity=9), 0),
    (ComposedKV(window=3, capacity=11), 0), (SimLayerKV(threshold=0.0, sinks=2, recent=5), 7)],
    ids=lambda case: getattr(case, "name", ""))
def test_a_run_holds_what_the_prompt_left_and_what_was_generated(policy, bound):
    ids, held = course(alone(policy), models())
    sizes = [len(head) for layer in held[0] for head in layer]
    assert len(ids) == len(held) and max(sizes) < len(PROMPT)
    assert not bound or max(sizes) <= bound
    assert policy.name not in ("ada_kv", "composed_kv") or len(set(sizes)) > 1
