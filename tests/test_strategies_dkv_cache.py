"""dKV-Cache: what it computes and what it reuses."""
from __future__ import annotations

import pytest

from playground.events import Figure
from strategies.diffusion.dkv_cache import DelayedReader, RandomOrderReader, neighbours
from support.cached_canvases import EXACT, WHOLE, EmbeddingsOnly
from support.canvases import LENGTH, computed, denoiser, difference, fills, run


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
