"""Caches of masked canvases: exact where they refresh at every step, and what they compute and reuse otherwise."""
from __future__ import annotations

import pytest

from playground.algorithms.diffusion import cached_reading
from playground.contract import make
from support.cached_canvases import EXACT, PLAIN, WHOLE, EmbeddingsOnly, plain
from support.canvases import computed, denoiser, difference, run

REFRESHED = {
    "fast_dllm": [dict(cache="prefix", refresh=1), dict(cache="dual", refresh=1)],
    "dkv_cache": [dict(variant=variant, interval=1) for variant in ("decode", "prefill", "pd")],
}
CASES = [(name, knobs) for name, several in REFRESHED.items() for knobs in several]


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


# --- windows ---

def test_every_reader_predicts_only_what_it_computed():
    reader = cached_reading.DualReader.__new__(cached_reading.DualReader)
    reader._computed, reader.lm = {2, 4}, type("Shifted", (), {"sources": lambda self, all: [i - 1 for i in all]})()
    assert reader.predicted([2, 3, 5, 6]) == [3, 5]
    assert make("fast_dllm").cache == "dual"
