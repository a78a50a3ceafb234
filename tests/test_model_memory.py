"""Models requested by visitors: what does not fit is refused before loading, and the page's own models are never
evicted.
"""
from __future__ import annotations

from threading import Event
from types import SimpleNamespace

import pytest
from chromium import PATIENCE

from playground.errors import Refusal
from playground.request_limits import Rules
from playground.ui.components.settings import Settings
from playground.ui.models.fits import DeviceMemory, MemoryGuard, Needed, needed_by
from playground.ui.server.model_loader import PENDING, ModelLoader, ModelRequest
from playground.ui.server.site import Site

GB = 10**9
LARGE, OTHER, OWN = ModelRequest("Qwen/Qwen3-1.7B"), ModelRequest("HuggingFaceTB/SmolLM2-1.7B-Instruct"), ModelRequest()


def guard(needed: float, total: float, free: float) -> MemoryGuard:
    return MemoryGuard(
        lambda wish: Needed(round(needed * GB), "cpu"), lambda device: DeviceMemory(round(total * GB), round(free * GB))
    )


def models(*names, **how):
    return SimpleNamespace(target=SimpleNamespace(name=names[0] or "pocket", device="cpu", dtype="int"), draft=None)


@pytest.mark.parametrize("needed, total, free, held", [(7.5, 16, 11, 0), (7.5, 16, 16, 5), (7.5, 8, 8, 0)],
                         ids=["too little is free", "another set is kept", "the machine is small"])
def test_models_that_do_not_fit_beside_the_others_are_refused_with_the_sizes(needed, total, free, held):
    with pytest.raises(Refusal, match=r"takes about 7\.5 GB, but only .* are free"):
        guard(needed, total, free).check(LARGE, held * GB)


def test_models_that_fit_are_counted():
    assert guard(7.5, 16, 14).check(LARGE, 4 * GB) == 7.5 * GB


def test_sets_that_are_kept_count_and_a_refused_one_is_not_loaded():
    loaded = []

    def load(*names, **how):
        loaded.append(names[0])
        return models(*names)

    loader = ModelLoader(load, OWN, guard(7.5, 16, 16).check)
    assert loader.request(LARGE).result()
    with pytest.raises(Refusal, match="but only .* are free"):
        loader.request(OTHER).result()
    assert loaded == ["Qwen/Qwen3-1.7B"]


def test_on_a_public_page_the_refusal_says_why_a_large_model_is_not_loaded(monkeypatch):
    monkeypatch.setattr("playground.ui.server.site.MemoryGuard", lambda: guard(7.5, 8, 6))
    site = Site(rules=Rules.for_visitors(), load=models)
    assert site.model_loader.request(site.model_request).result()
    with pytest.raises(Refusal, match="choose a smaller model"):
        site.chosen.load(Settings(model="Qwen/Qwen3-1.7B")).result()


def test_the_memory_of_the_bundled_pair_is_known_before_loading():
    pair, alone = needed_by(ModelRequest("pocket")), needed_by(ModelRequest("pocket", "none"))
    assert pair.bytes > alone.bytes > 1_000_000 and pair.device == "cpu"
    assert needed_by(ModelRequest("oracle")).bytes == 0
    assert alone.bytes < needed_by(ModelRequest("pocket", "nf4")).bytes < 2 * alone.bytes


def test_requests_of_visitors_never_evict_the_pages_own_models():
    loader = ModelLoader(models, OWN)
    own = loader.request(OWN)
    own.result()
    for number in range(10):
        loader.request(ModelRequest(f"model {number}")).result()
    assert loader.request(OWN) is own


def test_many_concurrent_models_are_refused_except_the_pages_own():
    loading = Event()
    loader = ModelLoader(lambda *names, **how: loading.wait(PATIENCE) and models(*names), OWN)
    for number in range(PENDING):
        loader.request(ModelRequest(f"model {number}"))
    with pytest.raises(Refusal, match=f"{PENDING} other sets of models are being loaded"):
        loader.request(ModelRequest("one more"))
    own = loader.request(OWN)
    loading.set()
    assert own.result().target.name == "pocket"
