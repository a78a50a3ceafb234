"""Elastic-Cache recomputes layers after one whose attention changed: against the method written out layer by layer."""
from __future__ import annotations

import math

import pytest
import torch
from architectures import SIZES
from torch import Tensor

from playground.algorithms.diffusion.attention_drift import AttentionDrift
from playground.contract.lane_config import LaneConfig, assemble
from playground.events import Figure, Note
from strategies.diffusion.elastic_cache import ElasticCache
from support.canvases import LENGTH, MASK, PROMPT, canvas, computed, denoiser, difference, fills, forwards, run

EXACT = 1e-5
DEPTH = SIZES["num_hidden_layers"]
WHOLE = len(PROMPT) + LENGTH
SMALL = dict(window=5, threshold=0.3)


# --- the method by hand, from its description ---

class ByHand:
    """Elastic-Cache over a Llama network, with copies of the last forward's queries and keys."""

    def __init__(self, model, gamma=0.9, window=16, threshold=0.9, tracked=1, axis="keys", always=False):
        self.network, self.beta, self.threshold = model.network.model, window, threshold
        self.head, self.gamma, self.count, self.axis = model.network.lm_head, gamma, tracked, axis
        self.always, self.ids = always, [*PROMPT, *[MASK] * LENGTH]
        self.x, self.q, self.k, self.v, self.top = {}, {}, {}, {}, {}
        self.course, self.updated = [], []  # fills, and layers that were computed whole

    def fill(self) -> list[tuple]:
        new = []
        with torch.inference_mode():
            while MASK in self.ids:
                window = [i for i, token in enumerate(self.ids) if token == MASK][:self.beta]
                new = self._forward(window, new)
        return self.course

    def _forward(self, window: list[int], new: list[int]) -> list[int]:
        tracked = sorted({i for some in self.top.values() for i in some})
        first = not self.course or self.always
        some, everything = sorted({*tracked, *new, *window}), list(range(len(self.ids)))
        rows, boundary = (everything, 0) if first else (some, DEPTH)
        x = self.network.embed_tokens(torch.tensor(self.ids))[rows]
        for layer in range(DEPTH):
            if layer == boundary and not first:
                self.x[layer][rows], rows = x, everything
                x = self.x[layer].clone()
            boundary, x = self._layer(layer, boundary, rows, x, tracked, window)
        self.updated.append(DEPTH - min(boundary, DEPTH))
        logits = self.head(self.network.norm(x))[[rows.index(i) for i in window]]
        logits[:, MASK] = -math.inf
        best = logits.softmax(-1).max(-1)
        needed = min(self.threshold, float(best.values.max()))
        chosen = [row for row in range(len(window)) if float(best.values[row]) >= needed]
        for row in chosen:
            self.ids[window[row]] = int(best.indices[row])
        self.course.append(([window[row] - len(PROMPT) for row in chosen], [int(best.indices[row]) for row in chosen],
                            [float(best.values[row]) for row in chosen]))
        return [window[row] for row in chosen]

    def _layer(self, layer: int, boundary: int, rows, x: Tensor, tracked, window) -> tuple[int, Tensor]:
        part, block = self.network.layers[layer].self_attn, self.network.layers[layer]
        if layer not in self.x:
            self.x[layer] = torch.zeros(len(self.ids), x.shape[1], dtype=x.dtype)
        self.x[layer][rows] = x
        old = (self.q[layer][:, tracked], self.k[layer].clone()) if layer in self.q else None
        self._project(layer, part, block.input_layernorm(x), rows)
        if layer < boundary:
            now, before = self._weights(self.q[layer][:, tracked], self.k[layer]), self._weights(*old)
            if self._cosine(now, before) < self.gamma:
                boundary = layer + 1
        attention = self._weights(self.q[layer][:, rows], self.k[layer])
        x = x + part.o_proj((attention @ self._grown(self.v[layer])).transpose(0, 1).flatten(1))
        votes = self._weights(self.q[layer][:, window], self.k[layer]).sum((0, 1))
        votes[[i for i, token in enumerate(self.ids) if token == MASK]] = 0
        self.top[layer] = votes.topk(self.count).indices.tolist()
        return boundary, x + block.mlp(block.post_attention_layernorm(x))

    def _project(self, layer: int, part, normed: Tensor, rows: list[int]) -> None:
        for store, project, turns in ((self.q, part.q_proj, True), (self.k, part.k_proj, True),
                                      (self.v, part.v_proj, False)):
            states = project(normed).view(len(rows), -1, part.head_dim).transpose(0, 1)
            if layer not in store:
                store[layer] = torch.zeros(len(states), len(self.ids), part.head_dim, dtype=states.dtype)
            store[layer][:, rows] = _turned(states, rows) if turns else states

    def _grown(self, states: Tensor) -> Tensor:
        return states.repeat_interleave(SIZES["num_attention_heads"] // len(states), 0)

    def _weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries @ self._grown(keys).mT / math.sqrt(queries.shape[-1])).softmax(-1)

    def _cosine(self, now: Tensor, before: Tensor) -> float:
        axis = -1 if self.axis == "keys" else 0
        return float(((now * before).sum(axis) / (now.norm(dim=axis) * before.norm(dim=axis))).mean())


def _turned(states: Tensor, positions: list[int]) -> Tensor:
    """Rotary embedding as complex numbers, with base 10000."""
    half = states.shape[-1] // 2
    angle = torch.tensor(positions)[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(states[..., :half], states[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def away(events, course: list[tuple]) -> float:
    """Largest difference of confidences; infinite if other positions or tokens were filled."""
    if [(fill.positions, fill.ids) for fill in fills(events)] != [(at, ids) for at, ids, _ in course]:
        return math.inf
    return max(abs(a - b) for fill, (*_, expected) in zip(fills(events), course)
               for a, b in zip(fill.confidences, expected))


def whole_layers(events) -> list[int]:
    """Layers that computed everything, forward by forward."""
    pictures = [event.data for event in events if isinstance(event, Figure) and event.shape == "matrix"]
    return [sum(row[-1] == 1 for row in picture["values"]) for picture in pictures]


@pytest.mark.oracle("elastic_cache")
@pytest.mark.parametrize("knobs", [
    dict(gamma=0.9), dict(gamma=0.7, tracked=2), dict(gamma=0.95, axis="heads"), dict(gamma=0.0), dict(gamma=1.05),
])
def test_it_fills_what_the_method_by_hand_fills(knobs):
    model, hand = denoiser(), ByHand(denoiser(), **SMALL | knobs)
    events = run(model, "elastic_cache", **SMALL | knobs)
    assert away(events, hand.fill()) < EXACT and whole_layers(events) == hand.updated


@pytest.mark.oracle("elastic_cache")
def test_refreshed_in_every_forward_it_is_a_sliding_window_without_a_cache():
    events = run(denoiser(), "elastic_cache", refresh=1, **SMALL)
    assert away(events, ByHand(denoiser(), always=True, **SMALL).fill()) < EXACT
    assert set(computed(events)) == {WHOLE} and set(whole_layers(events)) == {DEPTH}


class OneLayerLater(AttentionDrift):
    """Wrong: a layer after the next is the first to compute everything."""

    def _test(self, layer):
        super()._test(layer)
        if self.boundary is not None:
            self.boundary = layer + 2


class LeastAttended(AttentionDrift):
    """Wrong: the filled positions with the least attention are tracked."""

    def _top(self, layer):
        attention = self._attention(layer, self._window).sum((0, 1))
        attention[self._masked] = 1e9
        return attention.topk(self.tracked, largest=False).indices.tolist()


@pytest.mark.refuses("elastic_cache")
@pytest.mark.parametrize("wrong", [OneLayerLater, LeastAttended])
def test_another_first_layer_and_other_tracked_positions_give_other_confidences(wrong, monkeypatch):
    monkeypatch.setattr("strategies.diffusion.elastic_cache.AttentionDrift", wrong)
    assert away(run(denoiser(), "elastic_cache", **SMALL), ByHand(denoiser(), **SMALL).fill()) > EXACT


@pytest.mark.refuses("elastic_cache")
def test_positions_that_are_not_read_as_tokens_give_other_confidences():
    class Forgetful(ElasticCache):
        """Wrong: what was filled last keeps the states of its mask."""

        def _computed(self, lm, drift, window, filled):
            return super()._computed(lm, drift, window, [])

    found = run(denoiser(), "elastic_cache", Forgetful(**SMALL))
    assert away(found, ByHand(denoiser(), **SMALL).fill()) > EXACT


@pytest.mark.slow
def test_a_larger_gamma_computes_more_layers_whole():
    counts = [sum(whole_layers(run(denoiser(), "elastic_cache", gamma=gamma, window=5, threshold=1.05))[1:])
              for gamma in (0.0, 0.5, 0.9, 1.05)]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == (DEPTH - 1) * (LENGTH - 1)


def test_without_drift_a_repeated_forward_changes_nothing():
    """The same canvas and the same positions again: similarity 1 in all layers, and the same logits."""
    model = denoiser()
    drift = AttentionDrift(model.new_states(WHOLE), 0.999)
    text, window = [*PROMPT, *[None] * LENGTH], list(range(len(PROMPT), len(PROMPT) + 4))
    drift.begin(window, list(range(len(PROMPT), WHOLE)), everything=True)
    whole = model.denoise(text, window, None, drift.states)
    for _ in range(2):
        drift.begin(window, list(range(len(PROMPT), WHOLE)))
        again = model.denoise(text, window, sorted({*drift.watched, *window}), drift.states)
        finite = whole.isfinite()
        assert drift.similarity == pytest.approx([1.0] * DEPTH) and drift.boundary is None
        assert float((again - whole)[finite].abs().max()) < EXACT


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 0.9])
def test_where_no_position_learns_of_another_nothing_goes_stale(gamma, shifted):
    model = denoiser(shifted)
    for layer in model.network.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    found = run(model, "elastic_cache", gamma=gamma, far_cache=False, **SMALL)
    assert difference(found, run(model, "elastic_cache", refresh=1, **SMALL)) < EXACT


def test_commits_stay_in_the_window_and_a_forward_computes_it_and_what_is_tracked():
    events, masked = run(denoiser(), "elastic_cache", gamma=0.0, window=4, threshold=0.2), list(range(LENGTH))
    for fill, count in zip(fills(events), computed(events)):
        assert set(fill.positions) <= set(masked[:4]) and (count == WHOLE or count <= 4 + DEPTH + 4)
        masked = [position for position in masked if position not in fill.positions]
    wide = computed(run(denoiser(), "elastic_cache", gamma=0.0, window=4, threshold=0.2, far_cache=False))
    assert wide[1] > computed(events)[1]


def test_flops_count_the_layers_that_computed_everything():
    model, knobs = denoiser(), dict(window=4, threshold=1.05)
    reused, whole = (forwards(run(model, "elastic_cache", gamma=gamma, **knobs))[1] for gamma in (0.0, 1.05))
    some, context = reused.tokens, reused.context
    assert reused.flops == pytest.approx(model.flops(some, context, DEPTH))
    assert whole.flops == pytest.approx(model.flops(some, context, 1) + model.flops(WHOLE, 0, DEPTH - 1))


def test_the_first_end_token_fills_what_is_after_it_and_nothing_before():
    lane, strategy = canvas(denoiser(), assemble(LaneConfig("elastic_cache"))), ElasticCache()
    lane.model.end_ids = frozenset([42])
    lane.fill([2, 6], [11, 42], [1.0, 1.0]).go_on()
    note, request = strategy._cut(lane, [2, 6])
    request.go_on()
    assert isinstance(note, Note) and lane.masked == [0, 1, 3, 4, 5]
    lane.fill([3], [42], [1.0]).go_on()
    assert not list(strategy._cut(lane, [3]))  # only the first time
