"""Prompt compression in chunks, with budgets that heads share, and of lazy layers, against rules written by hand."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from registry import Collapse
from torch import Tensor

from playground.contract import Held, find, make
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from support.budget_policies import TREE, best, roomy, with_policy
from support.eviction import PROMPT, alone, course, models

ChunkKV, AdaKV, ComposedKV, SimLayerKV = map(find, ("chunk_kv", "ada_kv", "composed_kv", "sim_layer_kv"))
CUT = {"window": 3, "capacity": 11}


def equals(name: str, knobs: dict, other: str, shared: dict) -> list[Collapse]:
    return [Collapse(with_policy(plain, name, **knobs, **shared), with_policy(plain, other, **shared))
            for plain in (LaneConfig("greedy"), TREE)]


COLLAPSES = {
    "chunk_kv": [*roomy("chunk_kv", capacity=2048), *equals("chunk_kv", {"chunk": 1}, "snapkv", {**CUT, "kernel": 3})],
    "ada_kv": [*roomy("ada_kv", capacity=2048), *equals("ada_kv", {"alpha": 1.0}, "snapkv", CUT)],
    "composed_kv": [
        *roomy("composed_kv", capacity=2048),
        *equals("composed_kv", {"score": "attention", "chunk": 1}, "ada_kv", {**CUT, "alpha": 0.3, "kernel": 3}),
        *equals("composed_kv", {"score": "attention", "alpha": 1.0}, "chunk_kv", {**CUT, "chunk": 4, "kernel": 3}),
        *equals("composed_kv", {"score": "attention", "alpha": 1.0, "chunk": 1}, "snapkv", {**CUT, "kernel": 5}),
    ],
    "sim_layer_kv": roomy("sim_layer_kv", threshold=1.0),
}
HEADS, SLOTS, WINDOW = 3, 20, 3
EARLY = range(SLOTS - WINDOW)


def received(seed: int) -> Tensor:
    """Attention of the window, [heads, rows, slots]; the heads differ in how scattered it is."""
    logits = torch.randn(HEADS, WINDOW, SLOTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (logits * torch.tensor([0.2, 2.0, 5.0])[:, None, None]).softmax(-1)


def after_the_prompt(layer: int = 0) -> Held:
    return Held(layer, 2, "prefill", SLOTS, SLOTS, torch.arange(SLOTS)[None], read=None)


def stays(policy, seed: int) -> list[set[int]]:
    what = after_the_prompt()
    policy.observe_attention(0, received(seed), torch.arange(SLOTS - WINDOW, SLOTS), what.positions)
    kept = (policy.retain(what) & what.live).expand(HEADS, -1)
    return [{p for p in range(SLOTS) if row[p]} for row in kept.tolist()]


def votes(seed: int) -> list[dict[int, float]]:
    return [{p: sum(row[p] for row in head) for p in EARLY} for head in received(seed).tolist()]


def refused(check: Callable, wrong: type) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


LATE = set(range(SLOTS - WINDOW, SLOTS))


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


# --- shared budgets ---


def competing(heads: list[dict[int, float]], even: int, alpha: float) -> list[set[int]]:
    own = [best(head, int(alpha * even)) for head in heads]
    rest = {(n, p): score for n, head in enumerate(heads) for p, score in head.items() if p not in own[n]}
    more = sorted(rest, key=rest.get, reverse=True)[:even * len(heads) - sum(map(len, own))]
    return [own[n] | {p for m, p in more if m == n} for n in range(len(heads))]


def check_ada(cls: type) -> None:
    for seed in range(6):
        for alpha in (0.0, 0.3, 0.7, 1.0):
            policy = cls(window=WINDOW, capacity=WINDOW + 6, kernel=1, alpha=alpha)
            assert stays(policy, seed) == [LATE | head for head in competing(votes(seed), 6, alpha)]


class EvenBudgets(AdaKV):
    def __post_init__(self):
        super().__post_init__()
        self.alpha = 1.0


class NoSafeguard(AdaKV):
    def __post_init__(self):
        super().__post_init__()
        self.alpha = 0.0


@pytest.mark.oracle("ada_kv")
def test_heads_compete_for_what_is_left_of_the_budget():
    check_ada(AdaKV)


@pytest.mark.refuses("ada_kv")
@pytest.mark.parametrize("wrong", [EvenBudgets, NoSafeguard])
def test_a_wrong_share_is_refused(wrong):
    refused(check_ada, wrong)


def test_the_scattered_head_keeps_more_and_the_layer_keeps_as_much_as_snapkv():
    kept = stays(make("ada_kv", window=WINDOW, capacity=WINDOW + 6, kernel=1), 0)
    assert len(kept[0]) != len(kept[2]) and sum(map(len, kept)) == HEADS * (WINDOW + 6)


# --- a score, chunks and shared budgets together ---

KEYS = torch.randn(HEADS, SLOTS, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
KEYS[1] += 3 * KEYS[1, :1]  # keys of this head resemble each other


def worth(score: str, head: int) -> dict[int, float]:
    """Of each token before the window, from the keys of its head, by the definitions."""
    rows = KEYS[head].tolist()
    length = [sum(x * x for x in row) ** 0.5 for row in rows]
    if score == "key_norm":
        return {p: -length[p] for p in EARLY}
    mean = [sum(row[i] / length[p] for p, row in enumerate(rows)) for i in range(4)]
    size = sum(x * x for x in mean) ** 0.5
    return {p: -sum(a * b for a, b in zip(rows[p], mean)) / (length[p] * size) for p in EARLY}


def composed(score: str, chunk: int, even: int, alpha: float) -> list[set[int]]:
    chunks = [[p for p in EARLY if p // chunk == n] for n in range(SLOTS)]
    heads = []
    for head in range(HEADS):
        values = worth(score, head)
        heads.append({n: sum(values[p] for p in own) / len(own) for n, own in enumerate(chunks) if own})
    return [{p for n in kept for p in chunks[n]} for kept in competing(heads, even // chunk, alpha)]


def check_composed(cls: type) -> None:
    held = Held(0, 2, "prefill", SLOTS, SLOTS, torch.arange(SLOTS)[None], read=lambda part: KEYS)
    sizes = set()
    for score in ("key_diff", "key_norm"):
        for chunk, alpha in ((1, 0.3), (4, 0.0), (4, 0.5), (3, 1.0)):
            policy = cls(score=score, window=WINDOW, capacity=WINDOW + 8, chunk=chunk, alpha=alpha)
            kept = [{p for p in range(SLOTS) if row[p]} for row in policy.retain(held).expand(HEADS, -1).tolist()]
            assert kept == [LATE | head for head in composed(score, chunk, 8, alpha)]
            sizes.add(tuple(map(len, kept)))
    assert any(len(set(own)) > 1 for own in sizes), "heads keep different numbers"


class KeepsTheMostAlike(ComposedKV):
    """Wrong: keys that resemble the mean stay."""

    def _scores(self, held, late):
        return -super()._scores(held, late)


class ScoresTokensAlone(ComposedKV):
    """Wrong: chunks are ignored."""

    def retain(self, held):
        self.chunk = 1
        return super().retain(held)


class BudgetsApart(ComposedKV):
    """Wrong: every head keeps the same number."""

    def retain(self, held):
        self.alpha = 1.0
        return super().retain(held)


@pytest.mark.oracle("composed_kv")
def test_the_chunks_with_the_most_unusual_keys_stay_under_a_budget_that_heads_share():
    check_composed(ComposedKV)


@pytest.mark.refuses("composed_kv")
@pytest.mark.parametrize("wrong", [KeepsTheMostAlike, ScoresTokensAlone, BudgetsApart])
def test_other_scores_chunks_and_budgets_are_refused(wrong):
    refused(check_composed, wrong)


# --- lazy layers ---


def check_lazy(cls: type) -> None:
    for seed in range(8):
        for sinks, recent, threshold in ((2, 4, 0.3), (0, 6, 0.5), (4, 3, 0.9)):
            near = {p for p in range(SLOTS) if p < sinks or p >= SLOTS - recent}
            rows = [row for head in received(seed).tolist() for row in head]
            lazy = sum(row[p] for row in rows for p in near) / len(rows) > threshold
            policy = cls(sinks=sinks, recent=recent, window=WINDOW, threshold=threshold)
            assert stays(policy, seed) == [near if lazy else set(range(SLOTS))] * HEADS


class KeepsLazyLayers(SimLayerKV):
    def is_lazy(self, layer):
        return not super().is_lazy(layer)


class ForgetsTheSinks(SimLayerKV):
    def _share(self, held):
        sinks, self.sinks = self.sinks, 0
        found = super()._share(held)
        self.sinks = sinks
        return found


@pytest.mark.oracle("sim_layer_kv")
def test_a_layer_that_looks_at_its_ends_keeps_only_those():
    check_lazy(SimLayerKV)


@pytest.mark.refuses("sim_layer_kv")
@pytest.mark.parametrize("wrong", [KeepsLazyLayers, ForgetsTheSinks])
def test_a_wrong_laziness_is_refused(wrong):
    refused(check_lazy, wrong)


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


def test_a_benchmark_at_equal_budget_gets_chunks_that_fit():
    for tokens in (2, 9, 16, 64):
        assert make("chunk_kv", **ChunkKV.knobs_for_budget(tokens, 100)).capacity == tokens
