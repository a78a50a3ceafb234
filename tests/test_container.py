"""The container: what the Dockerfile copies, who it runs as, and what the compose file allows it."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from container_steps import Image, command, ignored, steps

ROOT = Path(__file__).parents[1]
STEPS = steps((ROOT / "Dockerfile").read_text(encoding="utf-8"))
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))


def all_of(word: str) -> list[str]:
    return [step.rest for step in STEPS if step.word == word]


def test_steps_are_read_with_their_continuation_lines_and_without_comments():
    read = steps("# a\nFROM x\n\nRUN a && \\\n    # b\n    c\nCMD [\"d\", \"e\"]\n")
    assert [(step.word, step.rest) for step in read] == [("FROM", "x"), ("RUN", "a && c"), ("CMD", '["d", "e"]')]
    assert command(read[-1].rest) == ["d", "e"]


def test_every_step_of_the_dockerfile_can_be_carried_out_here():
    assert all(hasattr(Image, f"_{step.word.lower()}") for step in STEPS)


def test_what_is_copied_exists_and_passes_dockerignore():
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    sources = [source for rest in all_of("COPY") for source in rest.split()[:-1]]
    assert {"app.py", "assets", "playground", "strategies"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists() and not ignored(source, rules), source
    assert ignored("tests", rules) and ignored(".git", rules)


def test_the_page_runs_as_its_own_user_and_receives_signals():
    words = [step.word for step in STEPS]
    assert all_of("USER") == ["player"] and words.index("USER") > max(i for i, w in enumerate(words) if w == "RUN")
    assert command(all_of("CMD")[0]) == ["python", "app.py"] and all_of("STOPSIGNAL") == ["SIGTERM"]
    assert "/health" in all_of("HEALTHCHECK")[0]


def test_torch_has_its_own_layer_before_the_sources():
    torch = next(i for i, step in enumerate(STEPS) if "grep '^torch'" in step.rest)
    sources = next(i for i, step in enumerate(STEPS) if step.word == "COPY" and "app.py" in step.rest)
    assert torch < sources and "DEVICE=cpu" in all_of("ARG")


@pytest.mark.parametrize("name", ["cpu", "gpu", "public"])
def test_every_service_is_read_only_without_privileges_and_stops_in_time(name):
    service = COMPOSE["services"][name]
    assert service["read_only"] and service["tmpfs"] == ["/tmp"] and service["cap_drop"] == ["ALL"]
    assert service["volumes"] == [f"models:{all_of('VOLUME')[0]}"]
    assert service["security_opt"] == ["no-new-privileges:true"] and service["stop_grace_period"] == "10s"
    assert service["profiles"] == [name]


def test_only_the_public_service_is_open_to_others_and_only_the_gpu_service_takes_a_gpu():
    services = COMPOSE["services"]
    bound = {name: service["ports"][0].startswith("127.0.0.1:") for name, service in services.items()}
    assert bound == {"cpu": True, "gpu": True, "public": False}
    assert services["public"]["environment"]["PLAYGROUND_PUBLIC"] == "1"
    devices = services["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert services["gpu"]["build"]["args"] == {"DEVICE": "cuda"} and "deploy" not in services["cpu"]


@pytest.mark.long
def test_the_steps_make_a_page_that_serves_from_a_read_only_root_and_drains():
    """Without a container engine; see container_steps.py. The default package index has to give torch for the CPU."""
    assert os.geteuid() == 0 and shutil.which("unshare"), "mounts of its own take root on Linux"
    steps_ = [sys.executable, "tests/container_steps.py", "--build-arg", "CPU_INDEX="]
    done = subprocess.run(steps_, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
