"""Runs of the page on ZeroGPU, with the package `spaces` that the platform installs."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

import playground
from playground.decoding.host_models import HostModel
from playground.engine.loading.load import Shelf
from playground.ui.benchmark.survey_run import SurveySettings
from playground.ui.components.settings import Settings
from playground.ui.server.zero_gpu import LEAST, MOST, seconds

ROOT = Path(__file__).parents[1]
PROMPT = "Tell me a story about Mia."


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory) -> dict[str, Any]:
    """What runs on ZeroGPU returned, by kind."""
    pytest.importorskip("spaces", reason="tests/requirements.txt lists it")
    offload = tmp_path_factory.mktemp("zero") / "offloaded"
    places = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    page = subprocess.run(
        [sys.executable, "tests/support/zero_gpu_page.py", str(offload)], cwd=ROOT, capture_output=True, text=True,
        timeout=300, env={**os.environ, "PYTHONPATH": places},
    )
    assert page.returncode == 0, page.stderr[-3000:]
    assert not offload.exists(), "the parent packed weights"
    return json.loads(page.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def here() -> list[int]:
    """The text of the greedy lane, generated on the CPU."""
    return playground.run("greedy", PROMPT, models=playground.load(dtype="float32"), chat=True, seed=2,
                          max_new_tokens=12).token_ids


def test_a_run_on_the_gpu_of_a_forked_process_gives_the_text_of_the_cpu(offloaded, here):
    assert offloaded["status"] == "cuda" and offloaded["run"]["error"] == "" and offloaded["run"]["failed"] == []
    assert offloaded["run"]["lanes"] == [here, here]
    assert {header["device"] for header in offloaded["run"]["headers"]} == {"cuda"}


def test_a_fork_reads_its_text_again_and_continues_it(offloaded, here):
    assert offloaded["fork"]["lanes"] == [here, here] and offloaded["fork"]["state"] == "done"


def test_scores_looks_and_attributions_are_computed_there(offloaded):
    assert len(offloaded["score"]["lanes"]) == 2 and not offloaded["score"]["failed"]
    assert offloaded["look"] == 9 and "effects" in offloaded["attributed"]


def test_one_process_serves_all_calls_until_it_ends(offloaded):
    processes = [query["pid"] for path, query in offloaded["requests"] if path == "/allow"]
    assert len(processes) == 2, "the second replaces the first when the platform asks for it"


def test_a_refusal_in_the_forked_process_arrives_as_its_sentence(offloaded):
    assert "write at least two" in offloaded["refused"]


def test_a_run_whose_time_is_over_keeps_what_it_has_and_says_so(offloaded, here):
    cut = offloaded["ended early"]
    assert cut["error"].startswith("The time on the GPU was over") and cut["state"] == "done"
    assert cut["headers"] and all(here[:len(lane)] == lane for lane in cut["lanes"])


def test_the_platforms_sentence_on_quotas_is_shown(offloaded):
    assert offloaded["quota"].startswith("Space app has reached its GPU limit.")


def test_quantised_weights_are_refused(offloaded):
    assert "choose no quantization" in offloaded["quantised"]


def test_every_request_asks_for_the_time_that_its_length_takes(offloaded):
    asked = [int(query["durationSeconds"]) for path, query in offloaded["requests"] if path == "/schedule"]
    assert asked[0] == seconds("run", Settings(length=12, lanes=[{}, {}])) > LEAST == asked[2]


def test_the_estimate_grows_with_the_length_up_to_a_limit():
    short, long = Settings(length=10, lanes=[{}]), Settings(length=400, lanes=[{}, {}])
    assert LEAST <= seconds("run", short) < seconds("run", long, object()) < seconds("run", long)
    assert seconds("survey", SurveySettings(length=4000)) == MOST
    assert seconds("look", long, "model", [1, 2], 3) == LEAST
    assert seconds("attribution", long, "model", list(range(200)), 100, 3) == LEAST + 10


def test_the_ranges_of_the_package_agree_with_the_requirements():
    """The requirements of `spaces` 0.51, which a Space installs beside them."""
    pytest.importorskip("spaces", reason="tests/requirements.txt lists it")
    needed = [Requirement(line) for line in metadata.requires("spaces")]
    assert needed and all(one.specifier.contains(metadata.version(one.name)) for one in needed)


def test_a_host_model_has_what_the_page_shows_of_a_model():
    models = playground.load(shelf=Shelf(HostModel), device="cpu", dtype="bfloat16")
    built = playground.load(device="cpu", dtype="bfloat16")
    for name in ("name", "revision", "quantization", "dtype", "parameters"):
        assert getattr(models.target, name) == getattr(built.target, name), name
    assert models.target.device == torch.device("cuda") and models.draft_place == ""
    assert not any(weight.is_inference() for weight in models.target.network.parameters())
