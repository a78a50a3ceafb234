"""Caches of masked canvases: exact where they refresh at every step, and what they compute and reuse otherwise."""
from __future__ import annotations

import pytest
import torch

from playground.algorithms.diffusion import cached_reading
from playground.contract import make
from playground.events import Figure
from strategies.diffusion.dkv_cache import DelayedReader, RandomOrderReader, neighbours
from strategies.diffusion.window_diffusion import WindowDiffusion
from support.canvases import LENGTH, PROMPT, computed, denoiser, difference, fills, run

EXACT = 1e-5
WHOLE = len(PROMPT) + LENGTH
PLAIN = dict(cache="none", threshold=1.05, block_length=6)
REFRESHED = {
    "fast_dllm": [dict(cache="prefix", refresh=1), dict(cache="dual", refresh=1)],
    "dkv_cache": [dict(variant=variant, interval=1) for variant in ("decode", "prefill", "pd")],
}
CASES = [(name, knobs) for name, several in REFRESHED.items() for knobs in several]


def plain(model, **knobs):
    return run(model, "fast_dllm", **PLAIN | knobs)


def one_at_a_time(name: str) -> dict:
    return dict(threshold=1.05, block_length=6) if name == "fast_dllm" else dict(block_length=6)


# --- refreshed at every step ---

@pytest.mark.oracle("fast_dllm", "dkv_cache")
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("name, knobs", CASES)
def test_a_cache_that_refreshes_at_every_step_equals_no_cache(name, knobs, shifted):
    model = denoiser(shifted)
    found = run(model, name, **one_at_a_time(name), **knobs)
    assert difference(found, plain(model)) < EXACT and set(computed(found)) == {WHOLE}


@pytest.mark.refuses("fast_dllm", "dkv_cache")
@pytest.mark.parametrize("name, knobs", [
    ("fast_dllm", dict(cache="prefix")), ("fast_dllm", dict(cache="dual")),
    ("dkv_cache", dict(variant="decode", interval=32)), ("dkv_cache", dict(variant="prefill")),
])
def test_without_the_refreshes_the_states_go_stale(name, knobs):
    model = denoiser()
    assert difference(run(model, name, **one_at_a_time(name), **knobs), plain(model)) > EXACT


class EmbeddingsOnly:
    """Weights with which no position learns of another: attention adds nothing."""

    @staticmethod
    def of(shifted: bool = False):
        model = denoiser(shifted)
        for layer in model.network.model.layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        return model


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("name, knobs", [
    ("fast_dllm", dict(cache="prefix")), ("fast_dllm", dict(cache="dual")),
    *(("dkv_cache", dict(variant=variant, interval=32)) for variant in ("decode", "prefill", "pd")),
])
def test_where_no_position_learns_of_another_nothing_goes_stale(name, knobs, shifted):
    model = EmbeddingsOnly.of(shifted)
    assert difference(run(model, name, **one_at_a_time(name), **knobs), plain(model)) < EXACT


# --- what is computed ---

def test_prefix_and_dual_caches_read_the_rest_and_the_block():
    prefix, dual = (computed(run(denoiser(), "fast_dllm", **PLAIN | dict(cache=cache))) for cache in ("prefix", "dual"))
    assert prefix == [WHOLE] + [14] * 5 + [WHOLE] + [8] * 5 + [WHOLE] + [2]
    assert dual == [WHOLE] + [6] * 5 + [WHOLE] + [6] * 5 + [WHOLE] + [2]


def test_a_shifted_model_also_computes_the_position_before_the_block():
    assert computed(run(denoiser(True), "fast_dllm", **PLAIN | dict(cache="dual")))[1] == 7


def test_dkv_reuses_a_position_from_the_second_forward_after_it_was_filled():
    counts = computed(run(denoiser(), "dkv_cache", interval=32, block_length=LENGTH))
    # the first two compute everything; the one of step i leaves out the prompt and what was filled before step i - 1
    assert counts == [WHOLE, WHOLE] + [LENGTH - (step - 1) for step in range(2, LENGTH)]


@pytest.mark.refuses("dkv_cache")
def test_reuse_without_the_delay_would_compute_fewer(monkeypatch):
    def hasty(self, block, masked, step):
        kept = {position for position in self.lm.everything if self._settled(position, self.filled[step])}
        return set(self.lm.everything) - kept

    delayed = run(denoiser(), "dkv_cache", interval=32, block_length=LENGTH)
    monkeypatch.setattr(DelayedReader, "computed", hasty)
    found = run(denoiser(), "dkv_cache", interval=32, block_length=LENGTH)
    assert computed(found)[2] == computed(delayed)[2] - 1 and difference(found, delayed) > EXACT


def test_dkv_keeps_a_position_of_a_shifted_model_while_it_predicts_a_mask():
    events = run(denoiser(True), "dkv_cache", interval=32, block_length=LENGTH)
    assert len(fills(events)) == LENGTH


def test_pd_never_computes_the_prompt_again():
    counts = computed(run(denoiser(), "dkv_cache", variant="pd", interval=3, block_length=LENGTH))
    assert counts[0] == WHOLE and max(counts[1:]) == LENGTH
    assert computed(run(denoiser(), "dkv_cache", variant="prefill", block_length=LENGTH))[1:] == [LENGTH] * (LENGTH - 1)


@pytest.mark.parametrize("shifted", [False, True])
def test_the_greedy_variant_computes_a_few_positions_in_a_random_order(shifted):
    events = run(denoiser(shifted), "dkv_cache", variant="greedy", interval=4, window=2, block_length=LENGTH)
    assert [fill.positions for fill in fills(events)] != [[i] for i in range(LENGTH)]
    assert sorted(fill.positions[0] for fill in fills(events)) == list(range(LENGTH))
    assert all(count <= 4 + shifted for step, count in enumerate(computed(events)) if step % 4)
    refreshed = run(denoiser(shifted), "dkv_cache", variant="greedy", interval=1, block_length=LENGTH)
    assert set(computed(refreshed)) == {WHOLE}


class NoStates(RandomOrderReader):
    """The same order, without states."""

    def read(self, block, masked, step):
        super().read(block, masked, step)
        return self.lm.read(self.next)


@pytest.mark.oracle("dkv_cache")
@pytest.mark.parametrize("interval, equal", [(1, True), (32, False)])
def test_the_greedy_variant_refreshed_at_every_step_equals_no_cache(interval, equal, monkeypatch):
    knobs = dict(variant="greedy", window=2, block_length=LENGTH)
    found = run(denoiser(), "dkv_cache", interval=interval, **knobs)
    monkeypatch.setattr("strategies.diffusion.dkv_cache.RandomOrderReader", NoStates)
    assert (difference(found, run(denoiser(), "dkv_cache", interval=interval, **knobs)) < EXACT) == equal


def figures(events, shape: str) -> list[dict]:
    return [event.data for event in events if isinstance(event, Figure) and event.shape == shape]


def test_the_picture_shows_what_was_computed_and_how_stale_the_rest_had_become():
    events = run(denoiser(), "dkv_cache", interval=4, block_length=LENGTH)
    picture = figures(events, "matrix")[-1]["values"]
    counts = [WHOLE if row == [1.0] * LENGTH else sum(row) for row in picture]
    assert counts == [min(count, WHOLE) for count in computed(events)][-len(counts):]
    likeness = figures(events, "bars")
    assert len(likeness) == 3  # refreshes in forwards 5, 9 and 13; the first layer reads nothing but the token
    assert all(one["values"][0] == pytest.approx(1) and max(one["values"][1:]) < 1 for one in likeness)
    fresh = run(EmbeddingsOnly.of(), "dkv_cache", interval=4, block_length=LENGTH)
    assert all(value == pytest.approx(1) for one in figures(fresh, "bars") for value in one["values"])


def test_neighbours_alternate_between_left_and_right():
    assert neighbours(5, [1, 3, 4, 5, 6, 9]) == [4, 6, 3, 1, 9]


# --- windows ---

@pytest.mark.oracle("window_diffusion")
@pytest.mark.parametrize("shifted", [False, True])
def test_a_window_of_the_whole_canvas_with_phases_of_one_step_is_plain_decoding(shifted):
    model = denoiser(shifted)
    found = run(model, "window_diffusion", visible=LENGTH, active=LENGTH, phase=1)
    assert difference(found, plain(model, block_length=LENGTH)) < EXACT


@pytest.mark.oracle("window_diffusion")
def test_pruned_positions_are_as_if_masked_out_of_attention():
    """The first forward against the library's, with an explicit mask and the original positions."""
    model = denoiser()
    first = fills(run(model, "window_diffusion", visible=5, active=3, phase=1))[0]
    seen = len(PROMPT) + 5
    ids = torch.tensor([PROMPT + [7] * LENGTH])
    allowed = torch.zeros(1, 1, WHOLE, WHOLE, dtype=torch.bool)
    allowed[..., :seen] = True
    with torch.inference_mode():
        logits = model.network(input_ids=ids, attention_mask=allowed, use_cache=False).logits[0]
    logits = logits.clone()
    logits[:, 7] = float("-inf")
    best = logits[len(PROMPT):len(PROMPT) + 3].softmax(-1).max(-1)
    position = int(best.values.argmax())
    assert (first.positions, first.ids) == ([position], [int(best.indices[position])])
    assert first.confidences[0] == pytest.approx(float(best.values[position]), abs=EXACT)


class Renumbered(WindowDiffusion):
    """Wrong: it predicts positions that it left out of the forward's states."""

    def _visible(self, lm, masked):
        return [*range(-len(PROMPT) + 2, 0), *masked[:self.visible]]


@pytest.mark.refuses("window_diffusion")
def test_leaving_out_a_part_of_the_prompt_gives_other_logits():
    model, knobs = denoiser(), dict(visible=LENGTH, active=LENGTH, phase=1)
    found = run(model, "window_diffusion", Renumbered(**knobs))
    assert difference(found, plain(model, block_length=LENGTH)) > EXACT


def test_a_phase_computes_the_visible_then_the_active_and_what_was_filled_in_it():
    counts = computed(run(denoiser(), "window_diffusion", visible=8, active=3, phase=4))
    assert counts[:5] == [len(PROMPT) + 8, 4, 5, 6, len(PROMPT) + 4 + 8]
    assert computed(run(denoiser(), "window_diffusion", visible=8, active=3, phase=4, far_field=True))[0] == WHOLE


def test_positions_beyond_the_active_ones_are_not_filled():
    for fill in fills(run(denoiser(), "window_diffusion", visible=6, active=2, phase=3, slide=False))[:2]:
        assert fill.positions[0] < 2
    events = run(denoiser(), "window_diffusion", visible=6, active=2, phase=8)
    assert sorted(fill.positions[0] for fill in fills(events)) == list(range(LENGTH))


def test_an_end_token_cuts_the_canvas_once_nothing_before_it_is_masked():
    model = denoiser()
    first = fills(run(model, "window_diffusion", visible=4, active=1, phase=1))[0].ids[0]
    model.end_ids = frozenset([first])
    events = run(model, "window_diffusion", visible=4, active=1, phase=1)
    assert len(fills(events)) == 2 and set(fills(events)[1].ids) == {first}
    whole = run(model, "window_diffusion", visible=4, active=1, phase=1, stop_at_end=False)
    assert len(fills(whole)) == LENGTH


def test_every_reader_predicts_only_what_it_computed():
    reader = cached_reading.DualReader.__new__(cached_reading.DualReader)
    reader._computed, reader.lm = {2, 4}, type("Shifted", (), {"sources": lambda self, all: [i - 1 for i in all]})()
    assert reader.predicted([2, 3, 5, 6]) == [3, 5]
    assert make("fast_dllm").cache == "dual"
