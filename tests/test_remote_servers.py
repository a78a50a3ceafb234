"""Remote lanes against real servers of the bundled model: the same greedy text as the local lane.

Both servers need packages that the playground does not: each is installed into a folder of its own.
"""
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

import playground
from playground.asset_files import ASSETS
from playground.events import TopLogprobs
from playground.remote.remote_server import RemoteServer
from playground.trace.lane_metrics import diff
from playground.trace.result import Result
from support.launched import free_port

pytestmark = pytest.mark.long
HERE, POCKET, STARTING = Path(__file__).parent, ASSETS / "models" / "pocket", 240
ASKED = {"raw": ("The red fox", False), "chat": ("Tell me a story about Mia.", True)}


def installed(folder: Path, *packages: str) -> dict[str, str]:
    """The environment of a process that has these packages too; nothing that is here is replaced."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    subprocess.run(pip, check=True, timeout=600)
    return os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}


@contextmanager
def serving(command: list[str], environment: dict[str, str], port: int) -> Iterator[str]:
    """The address of a server once it answers."""
    process, address = subprocess.Popen(command, env=environment), f"http://127.0.0.1:{port}"
    try:
        wait_for(process, address)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def wait_for(process: subprocess.Popen, address: str) -> None:
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended before it answered"
        try:
            urlopen(f"{address}/health", timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"the server did not answer within {STARTING} s")


@pytest.fixture(scope="module")
def transformers_serve(tmp_path_factory) -> Iterator[RemoteServer]:
    environment = installed(tmp_path_factory.mktemp("openai"), "openai>=3,<4", "jiter", "distro", "sniffio")
    port = free_port()
    options = ["--port", str(port), "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"]
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", *options]
    with serving([*command, str(POCKET)], environment, port) as address:
        yield RemoteServer.given(address, str(POCKET))


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory) -> Iterator[RemoteServer]:
    folder, port = tmp_path_factory.mktemp("llama"), free_port()
    environment = installed(folder / "site", "gguf>=0.19,<0.20", "xllamacpp>=2026.10")
    model = str(folder / "pocket.gguf")
    subprocess.run(
        [sys.executable, str(HERE / "convert_to_gguf.py"), str(POCKET), model], check=True, env=environment, timeout=120
    )
    with serving([sys.executable, str(HERE / "llama_server.py"), model, str(port)], environment, port) as address:
        yield RemoteServer.given(address, "pocket")


def both(server: RemoteServer, asked: str) -> tuple[Result, Result]:
    """The local greedy lane and the remote one, on one prompt."""
    prompt, chat = ASKED[asked]
    models = playground.load(draft="none", device="cpu", dtype="float32")
    local, remote = playground.compare(["greedy"], prompt, chat=chat, models=models, max_new_tokens=48, remote=server)
    assert remote.message == ""
    return local, remote


@pytest.mark.parametrize("asked", ASKED)
def test_transformers_serve_writes_the_greedy_text_of_the_local_lane(transformers_serve, asked):
    local, remote = both(transformers_serve, asked)
    assert remote.text == local.text and diff(local.trace, remote.trace) is None


@pytest.mark.parametrize("asked", ASKED)
def test_llama_cpp_writes_the_greedy_text_of_the_local_lane_and_its_log_probabilities(llama_cpp, asked):
    local, remote = both(llama_cpp, asked)
    assert remote.text == local.text
    tops = [stamped.event.top for stamped in remote.trace.events if isinstance(stamped.event, TopLogprobs)]
    assert len(tops) == len(remote.token_ids) and tops[0][0][1] == remote.logprobs[0]
    assert remote.logprobs == pytest.approx(local.logprobs[:len(remote.logprobs)], abs=1e-2)
