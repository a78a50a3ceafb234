"""Chunks of the prompt (ChunkKV): what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch

from playground.contract import find, make
from playground.errors import Refusal
from support.budget_policies import roomy
from support.window_votes import CUT, EARLY, LATE, SLOTS, WINDOW, equals, stays, votes
from support.wrong_variants import refused

ChunkKV = find("chunk_kv")
COLLAPSES = {
    "chunk_kv": [*roomy("chunk_kv", capacity=2048), *equals("chunk_kv", {"chunk": 1}, "snapkv", {**CUT, "kernel": 3})],
}


# --- chunks ---

def best_chunks(scores: dict[int, float], chunk: int, share: int) -> set[int]:
    chunks = [[p for p in EARLY if p // chunk == n] for n in range(SLOTS)]
    means = {n: sum(scores[p] for p in tokens) / len(tokens) for n, tokens in enumerate(chunks) if tokens}
    chosen = sorted(means, key=lambda n: (-means[n], n))[:share // chunk]
    return {p for n in chosen for p in chunks[n]}


def check_chunks(cls: type) -> None:
    for seed in range(6):
        for chunk, capacity in ((4, 11), (5, 14), (2, 6)):
            policy = cls(window=WINDOW, capacity=capacity, chunk=chunk)
            expected = [LATE | best_chunks(head, chunk, capacity - WINDOW) for head in votes(seed)]
            assert stays(policy, seed) == expected


class SumsChunks(ChunkKV):
    """Wrong: a short chunk at the end of the prompt is worth less."""

    def best_chunks(self, scores, positions, early):
        number = positions // self.chunk
        size = torch.zeros_like(scores).scatter_add(1, number, early.to(scores)).gather(1, number)
        return super().best_chunks(scores * size, positions, early)


class SingleTokens(ChunkKV):
    def best_chunks(self, scores, positions, early):
        self.chunk = 1
        return super().best_chunks(scores, positions, early)


@pytest.mark.oracle("chunk_kv")
def test_the_chunks_with_the_highest_mean_attention_stay_as_a_whole():
    check_chunks(ChunkKV)


@pytest.mark.refuses("chunk_kv")
@pytest.mark.parametrize("wrong", [SumsChunks, SingleTokens])
def test_wrong_chunks_are_refused(wrong):
    refused(check_chunks, wrong)


def test_a_budget_without_room_for_a_chunk_is_refused():
    with pytest.raises(Refusal, match="less than a chunk"):
        make("chunk_kv", window=4, capacity=10, chunk=8)


# --- lazy layers ---

def test_a_benchmark_at_equal_budget_gets_chunks_that_fit():
    for tokens in (2, 9, 16, 64):
        assert make("chunk_kv", **ChunkKV.knobs_for_budget(tokens, 100)).capacity == tokens
