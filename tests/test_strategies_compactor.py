"""Compactor: scores and tokens of NVIDIA's kvpress, its parts in plain Python, and when it evicts."""
from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from playground.contract import Held, find, make
from playground.errors import Refusal
from strategies.kv_cache.compactor import attended_in_chunks, leverages
from support.budget_policies import best, roomy
from support.kvpress_scores import (
    BLENDING,
    CHUNKS,
    FIRST,
    GROUP,
    HEADS,
    LAST,
    OUT,
    SKETCH,
    TOKENS,
    projection,
    queries,
    states,
    turned,
)

Compactor = find("compactor")
COLLAPSES = {"compactor": roomy("compactor", capacity=2048)}
REFERENCE = json.loads(OUT.read_text(encoding="utf-8"))["compactor"]


def back(rows: Tensor, positions: Tensor) -> Tensor:
    """Rows [heads, n, d] of tokens at consecutive positions, rotated back."""
    whole = rows.new_zeros(len(rows), TOKENS, rows.shape[-1])
    whole[:, positions] = rows
    return turned(whole, back=True)[:, positions]


def policy(cls=Compactor, chunk: int = 5, capacity: int = 20, **knobs):
    """One that has read the prompt of the reference."""
    made = cls(chunk=chunk, capacity=capacity, first=FIRST, last=LAST, sketch=SKETCH, blending=BLENDING, **knobs)
    made.begin(SimpleNamespace(rotate_back=back))
    made.projection = lambda layer, keys: projection() * SKETCH**-0.5
    rotated = turned(queries()).unflatten(0, (HEADS, GROUP))
    for start in (0, 11, 30):  # in pieces
        made.observe_queries(0, rotated[:, :, start:{0: 11, 11: 30, 30: TOKENS}[start]])
    return made


def held(generated: int = 0) -> Held:
    parts = {"keys": turned(states("keys")), "values": states("values")}
    return Held(0, 1, "prefill", TOKENS, TOKENS + generated, torch.arange(TOKENS)[None], read=parts.get)


def middle(scores: Tensor) -> Tensor:
    return scores[:, FIRST:TOKENS - LAST]


def differs(cls) -> bool:
    """Whether scores are not those of the library."""
    return any(
        not torch.allclose(middle(policy(cls, chunk).scores(held())), middle(torch.tensor(REFERENCE[str(chunk)])),
                           atol=2e-4)
        for chunk in CHUNKS
    )


@pytest.mark.oracle("compactor")
def test_scores_are_those_of_the_library():
    assert not differs(Compactor)


@pytest.mark.oracle("compactor")
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("capacity", [12, 13, 20, 36])
def test_the_tokens_that_stay_are_those_that_the_library_puts_first(chunk, capacity):
    kept = policy(chunk=chunk, capacity=capacity).retain(held())
    always = {*range(FIRST), *range(TOKENS - LAST, TOKENS)}
    for row, scores in zip(kept, REFERENCE[str(chunk)]):
        inner = {p: score for p, score in enumerate(scores) if p not in always}
        assert set(row.nonzero()[:, 0].tolist()) == always | best(inner, capacity - len(always))


class WithRotation(Compactor):
    """Wrong: keys count as they are in the cache."""

    def begin(self, parts):
        self._parts = SimpleNamespace(rotate_back=lambda rows, positions: rows)


class Scaled(Compactor):
    """Wrong: attention with the usual scale."""

    def observe_queries(self, layer, query_states):
        super().observe_queries(layer, query_states * query_states.shape[-1] ** -0.5)


class AttentionAlone(Compactor):
    """Wrong: the leverage does not count."""

    def scores(self, held):
        self.blending = 0.0
        return super().scores(held)


class WholePrompt(Compactor):
    """Wrong: all tokens attend to each other."""

    def scores(self, held):
        self.chunk = 4096
        return super().scores(held)


@pytest.mark.refuses("compactor")
@pytest.mark.parametrize("wrong", [WithRotation, Scaled, AttentionAlone, WholePrompt])
def test_other_scores_are_detected(wrong):
    assert differs(wrong)


def test_the_leverages_of_independent_rows_are_one_and_those_of_equal_rows_are_shared():
    rows = torch.eye(6, dtype=torch.float64)[None] * 1e3
    rows = torch.cat([rows, rows[:, :1]], 1)
    found = leverages(rows + 7.0, torch.eye(6, dtype=torch.float64)[None])[0]
    exact = rows[0] - rows[0].mean(0)
    hat = exact @ torch.linalg.pinv(exact)
    assert torch.allclose(found, hat.diagonal(), atol=1e-3) and found[0] < found[1]


def test_attention_within_a_chunk_by_hand():
    keys, asked = states("keys")[:1, :5].double(), states("values")[:1, :5].double()
    found = attended_in_chunks(asked[:, None], keys, 3)[0, 0]
    rows = [[float(q @ k) for k in keys[0, :3]] for q in asked[0, :3]]
    for column in range(3):
        expected = sum(math.exp(row[column]) / sum(map(math.exp, row)) for row in rows)
        assert float(found[column]) == pytest.approx(expected)


def test_the_prompt_is_compressed_once_and_generated_tokens_stay():
    made = policy(capacity=20)
    kept = made.retain(held())
    assert (kept.sum(1) == 20).all() and not made._queries
    later = Held(0, 1, "keep", TOKENS, TOKENS + 2, torch.arange(22)[None].expand(HEADS, -1), read=lambda part: None)
    assert made.retain(later).all()
    reading = Held(0, 1, "keep", TOKENS, 9, torch.arange(9)[None], read=lambda part: None)
    assert make("compactor", capacity=12, first=1, last=1).retain(reading).all()


def test_a_capacity_below_the_tokens_that_always_stay_is_refused():
    with pytest.raises(Refusal, match="raise capacity"):
        make("compactor", capacity=10, first=8, last=4).check()
