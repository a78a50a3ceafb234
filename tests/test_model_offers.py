"""Which models fit this machine: sizes, memory, speeds with their sources, and the one that is proposed."""
from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from toys import save

import playground
from playground.decoding.decode_speed import DecodeSpeeds, tokens_per_second
from playground.engine import memory_bandwidth as bandwidth
from playground.engine.checkpoint.catalogue import SUGGESTED
from playground.engine.loading import model_sizes as sizes
from playground.engine.loading.load import HEADROOM, Loading
from playground.engine.loading.model_sizes import HubModel, ModelSize, hub_model, local_size
from playground.errors import Refusal
from playground.request_limits import Rules
from playground.ui.models import model_offers
from playground.ui.models.fits import RESERVED, DeviceMemory
from playground.ui.models.model_offers import ModelOffer, Room, best
from playground.ui.models.model_sheet import listing, proposal_button
from playground.ui.server.model_loader import ModelLoader, ModelRequest
from playground.ui.server.site import Site
from support.hub_standin import hub_standin

TINY = SUGGESTED[0].name
CPU = Loading("cpu", "float32").resolve()
ON_CPU = ModelRequest(device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """A hub with a toy under the names of all models that the page suggests."""
    with hub_standin(monkeypatch, tmp_path / "cache", {entry.name: folder for entry in SUGGESTED}) as hub:
        yield hub


@pytest.fixture
def site(monkeypatch) -> Site:
    """A local page with 1 GB of free memory that is read at 10 GB a second."""
    monkeypatch.setattr(model_offers, "memory_of", lambda device: DeviceMemory(4 * 10**9, 10**9))
    monkeypatch.setattr(bandwidth, "memory_bandwidth", lambda device: 1e10)
    return Site()


def offer(site: Site, name: str) -> ModelOffer:
    return next(one for one in site.offers.listed(ON_CPU) if one.entry.name == name)


# --- sizes ---

def test_the_hub_s_own_numbers_say_what_a_model_takes_and_its_files_agree_once_they_are_here(hub, folder):
    size = hub_model(TINY).size(CPU)
    on_disk = sum(path.stat().st_size for path in folder.iterdir())
    assert hub.asked == [f"/api/models/{TINY}"], "one request, and nothing is fetched"
    assert size.stored == size.missing == on_disk and size.loaded == 4 * size.parameters
    playground.load(TINY, "none", device="cpu")
    assert local_size(TINY, CPU) == replace(size, missing=0)
    assert local_size(SUGGESTED[1].name, CPU) is None


def test_a_download_is_counted_in_bytes_and_ends_when_it_is_cancelled(hub, tmp_path):
    loader, request = ModelLoader(playground.load), ModelRequest(TINY, "none", "cpu")
    hub.flows.clear()
    loading = loader.request(request)
    watch = loading.watch()
    next(now for now in watch if "Fetching model.safetensors" in now.text and now.fraction > 0.3)
    assert " MB of " in loading.text and loading.fraction < 0.7
    loader.cancel(request)
    hub.flows.set()
    with pytest.raises(Refusal, match="Loading was cancelled"):
        loading.result()
    assert not list(tmp_path.rglob("*.incomplete")) and local_size(TINY, CPU) is None
    assert loader.request(request).result().target.name == TINY


def test_a_load_that_others_wait_for_is_not_cancelled(hub):
    loader, request = ModelLoader(playground.load), ModelRequest(TINY, "none", "cpu")
    hub.flows.clear()
    loading = loader.request(request)
    watches = [loading.watch(), loader.request(request).watch()]
    for watch in watches:
        next(watch)
    loader.cancel(request)
    hub.flows.set()
    assert loading.result().target.name == TINY


# --- what fits ---

def test_a_model_fits_if_it_and_its_draft_leave_what_a_run_needs(site, hub):
    assert site.offers.ask_hub() == ""
    small = offer(site, SUGGESTED[1].name)
    assert small.draft == TINY and small.fits and not small.here
    assert small.needed == round(2 * hub_model(TINY).size(CPU).loaded * HEADROOM)
    site.offers._hub = {name: HubModel(name, 125 * 10**6, {"w": 2 * 10**8}) for name in site.offers._hub}
    large = offer(site, SUGGESTED[1].name)
    rows = [row for group in listing([large], site.offers.room(ON_CPU), "")["groups"] for row in group["rows"]]
    assert not large.fits and not rows[0]["loads"]
    assert rows[0]["why"] == "It takes 1.1 GB with its draft, and 1.0 GB are free."


def test_a_public_page_keeps_memory_for_its_runs(monkeypatch):
    monkeypatch.setattr(model_offers, "memory_of", lambda device: DeviceMemory(4 * 10**9, 3 * 10**9))
    local, public = Site(), Site(rules=Rules.for_visitors())
    assert local.offers.room(ON_CPU).free == 3 * 10**9
    assert public.offers.room(ON_CPU).free == round((3 - 4 * RESERVED) * 10**9)


def test_a_hub_that_cannot_be_reached_is_one_sentence_and_is_not_asked_again_at_once(site, hub):
    hub.server.shutdown()
    hub.server.server_close()
    now = [100.0]
    site.offers._now = lambda: now[0]
    said = site.offers.ask_hub()
    assert said.startswith("The hub cannot be reached (it refuses the connection): only models that are on this")
    asked = []
    site.offers._look_up = asked.append
    assert site.offers.ask_hub() == said and asked == []
    now[0] += model_offers.PAUSE
    assert site.offers.ask_hub() == "" and len(asked) == len(SUGGESTED)
    assert site.offers.ask_hub() == "" and len(asked) == len(SUGGESTED), "nor is one that knows a model no more"
    sheet = listing(site.offers.listed(ON_CPU), site.offers.room(ON_CPU), said)
    assert sheet["groups"][-1]["title"] == "From the hub"
    rows = {row["name"]: row for group in sheet["groups"] for row in group["rows"]}
    assert sheet["hub"] == said and rows["pocket"]["loads"] and not rows[TINY]["loads"]
    with pytest.raises(Refusal, match="choose a bundled model or a folder.$"):  # no "Did you mean" the same name
        hub_model(TINY)


# --- speeds ---

def slow_down(model) -> None:
    """Make every forward of a model last 20 ms longer."""
    forward = model.forward
    model.forward = lambda *given, **how: time.sleep(0.02) or forward(*given, **how)


def test_a_measured_speed_is_that_of_plain_decoding_and_outlives_the_process(tmp_path):
    models = playground.load("pocket", "none", device="cpu")
    quick = tokens_per_second(models.target)
    slow_down(models.target)
    slow = tokens_per_second(models.target)
    assert 8 < slow < min(50, quick), "20 ms a forward bound it to 50 tokens a second"
    first = DecodeSpeeds(tmp_path / "speeds.json")
    first.measure(models.target)
    kept = DecodeSpeeds(tmp_path / "speeds.json").find("pocket", "cpu", "float32", "none")
    assert kept == first.find("pocket", "cpu", "float32", "none") and kept < 50
    assert first.find("pocket", "cpu", "bfloat16", "none") is None
    assert tokens_per_second(playground.load("pocket-diffusion", device="cpu").target) is None
    (tmp_path / "speeds.json").write_text('{"pocket cpu float32 none": "fast"}')
    assert DecodeSpeeds(tmp_path / "speeds.json").find("pocket", "cpu", "float32", "none") is None


def test_a_speed_is_derived_from_the_bandwidth_until_it_is_measured_and_says_so(site, hub):
    site.offers.ask_hub()
    site.offers._hub = {name: HubModel(name, 10**8, {"w": 2 * 10**8}) for name in site.offers._hub}
    derived = offer(site, TINY)
    assert derived.speed == 1e10 / (4 * 10**8) and not derived.measured
    site.offers.speeds._measured[f"{TINY} cpu float32 none"] = 12.5
    measured = offer(site, TINY)
    assert (measured.speed, measured.measured) == (12.5, True)
    texts = [row["speed"] for one in (derived, measured)
             for row in listing([one], site.offers.room(ON_CPU), "")["groups"][0]["rows"]]
    assert texts == ["at most 25 tokens/s, derived", "12 tokens/s, measured"]
    assert offer(site, "pocket-moe").speed is None, "so small a model stays in caches"


def test_on_a_cpu_the_sheet_says_which_quantisation_is_fast():
    on_cpu, on_gpu = (listing([], Room(device, 10**9, 10**9), "") for device in ("cpu", "cuda:0"))
    assert all(words in on_cpu["quantising"] for words in ("32.1 tokens/s in nf4", "15.2 in int8", "14.4 in bfloat16"))
    assert on_gpu["quantising"] == ""


def test_the_bandwidth_is_at_most_what_a_copy_of_the_same_bytes_says(monkeypatch):
    import torch
    monkeypatch.setattr(bandwidth, "SHAPE", (2048, 2048))
    found = bandwidth.memory_bandwidth.__wrapped__("cpu")
    source, target = torch.ones(2048, 2048), torch.empty(2048, 2048)
    begun = time.perf_counter()
    for _ in range(20):
        target.copy_(source)
    copied = 20 * 2 * source.nbytes / (time.perf_counter() - begun)  # read and written
    assert copied / 20 < found < 20 * copied, "of the same order, whatever the load"


# --- a proposal ---

def proposable(name: str, parameters: int, speed: float, here: bool = False) -> ModelOffer:
    entry = replace(SUGGESTED[0], name=name)
    return ModelOffer(entry, "", ModelSize(parameters, parameters, parameters), here, parameters, True, speed)


def test_the_best_model_is_the_largest_that_keeps_pace_with_a_reader():
    small, large, huge = (proposable(*facts) for facts in (("s", 1, 40.0), ("l", 3, 9.0), ("h", 9, 2.0)))
    assert best([small, large, huge]) is large
    assert best([huge, proposable("g", 8, 3.0)]).entry.name == "g", "where none does, the fastest"
    kept = proposable("k", 2, 20.0, here=True)
    assert best([small, large, huge, kept]) is kept, "nothing is to be downloaded"
    assert best([]) is None


def test_a_real_model_is_proposed_in_place_of_the_toy_where_the_hub_answers(site, hub):
    assert "playground.openModels()" in proposal_button(site.offers.proposed)
    proposed = site.offers.propose(ON_CPU)
    assert proposed.entry in SUGGESTED and proposed.size.missing
    assert f"data-model='{proposed.entry.name}'" in proposal_button(proposed)
    assert Site(ModelRequest(TINY)).offers.propose(ON_CPU) is None, "a page with a real model of its own"


def test_on_a_public_page_the_owner_chooses_what_is_proposed(hub, monkeypatch):
    monkeypatch.setenv("PLAYGROUND_PUBLIC", "1")
    assert Site.from_environment(ModelRequest()).offers.propose(ON_CPU) is None and hub.asked == []
    monkeypatch.setenv("PLAYGROUND_PROPOSES", SUGGESTED[2].name)
    assert Site.from_environment(ModelRequest()).offers.propose(ON_CPU).entry == SUGGESTED[2]
    monkeypatch.setenv("PLAYGROUND_PROPOSES", "gpt-17")
    with pytest.raises(Refusal, match="PLAYGROUND_PROPOSES is 'gpt-17', which is no model of the page's list"):
        Site.from_environment(ModelRequest()).check()


def test_sizes_name_no_file_that_loading_would_not_read(hub):
    assert sizes.hub_files(TINY, sizes.hub_info(TINY)).files.keys() >= {"config.json", "model.safetensors"}
    with pytest.raises(Refusal, match="The hub has no model 'someone/else'"):
        hub_model("someone/else")
