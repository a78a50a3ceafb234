"""The page's process on ZeroGPU, with the package `spaces` itself and a stand-in for the GPU: prints what runs return.

Run by tests/test_zero_gpu.py in its own process, because `spaces` replaces functions of torch for good. It forks real
processes. Replaced are the platform's HTTP service, the symbols that only a CUDA build of torch has, and, in the forked
process, the GPU.
"""
from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

requests: list[tuple[str, dict[str, str]]] = []  # path and query of every request to the platform
ALLOWED = {"idle": True, "nvidiaIndex": 0, "nvidiaUUID": "GPU-0", "allowToken": "token"}
QUOTA = {"left": 5, "wait": "PT1H"}
answers = {"/schedule": (200, ALLOWED)}


class Platform(BaseHTTPRequestHandler):
    """The service that allocates GPUs (`spaces.zero.api`)."""

    def do_POST(self) -> None:  # noqa: N802 the name that http.server calls
        url = urlsplit(self.path)
        requests.append((url.path, {name: values[0] for name, values in parse_qs(url.query).items()}))
        status, body = answers.get(url.path, (200, {}))
        sent = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


def start_platform(offload: str) -> None:
    """Start the service and set the variables of a Space with ZeroGPU."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Platform)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.update(SPACES_ZERO_GPU="true", SPACES_ZERO_DEVICE_API_URL=f"http://127.0.0.1:{server.server_port}",
                      ZEROGPU_OFFLOAD_DIR=offload, SPACE_ID="someone/playground")


def never_forked_badly() -> bool:
    return False


def pretend_a_cuda_build() -> None:
    """Add the symbols that `spaces` asks a CUDA build of torch for."""
    import torch._dynamo.device_interface  # chooses by the build what it imports
    for name in ("_cuda_init", "_cuda_setDevice", "_cuda_getDevice", "_cuda_getDeviceCount"):
        if not hasattr(torch._C, name):
            setattr(torch._C, name, lambda *_: 0)
    torch.version.cuda = "13.0"
    torch.cuda._is_in_bad_fork = never_forked_badly  # `spaces` pickles it


def give_forked_processes_a_gpu() -> None:
    """Every thread that `spaces` starts in a forked process sees the stand-in as its GPU."""
    from spaces.zero import torch as zero_torch
    from spaces.zero import wrappers

    def init(uuid: str) -> None:
        from gpu_standin import Standin
        from transformers import PreTrainedModel
        assert zero_torch.size() == 0, "the parent has created a tensor on its pretended GPU"
        machine = Standin()
        PreTrainedModel.to = lambda network, device: {"cuda": machine.move}[device](network)
        wrappers.ThreadPoolExecutor = partial(ThreadPoolExecutor, initializer=machine.__enter__)

    zero_torch.init, zero_torch.move = init, lambda callback: None


def outcome(run: Any) -> dict[str, Any]:
    """A run to its end: its text as token ids by lane, the device of its lanes, and its error."""
    frames = list(run.frames())
    json.dumps(frames)  # raises for anything but plain data
    lanes: dict[int, list[int]] = {}
    for event in run.events:
        if event["kind"] == "commit":
            lanes.setdefault(event["lane"], []).extend(event["ids"])
    failed = [event["message"] for event in run.events if event["kind"] == "failed"]
    return {"lanes": [lanes[lane] for lane in sorted(lanes)], "error": run.error, "state": frames[-1]["state"],
            "failed": failed, "headers": run.headers, "frames": len(frames)}


def ending_early(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Sessions whose process ends after some tokens, as at the end of its time on the GPU."""
    def prepared(*given: Any) -> Any:
        session = prepare(*given)
        advance = session.advance
        session.advance = lambda: advance() if len(session.trace.events) < 20 else os._exit(1)
        return session
    return prepared


def refusal(act: Callable[[], Any]) -> str:
    from playground.errors import Refusal
    try:
        act()
    except Refusal as refused:
        return str(refused)
    return ""


def main(offload: str) -> None:
    start_platform(offload)
    pretend_a_cuda_build()
    from playground.decoding.forked_session import Siblings
    from playground.decoding.visitor_memory import Memory
    from playground.ui.components.settings import Settings
    from playground.ui.server.site import Site
    site = Site()
    give_forked_processes_a_gpu()
    site.warm(wait=True)
    asked = Settings(prompt="Tell me a story about Mia.", mode="chat", seed=2, length=12, dtype="float32", lanes=[
        {"strategy": "greedy"},
        {"strategy": "speculative", "extras": [["draft_model", {"depth": 4}], ["greedy_match", {}]]},
    ])
    loading = site.chosen.load(asked)
    loading.result()
    said: dict[str, Any] = {"status": str(loading.models.target.device)}
    run = site.runs.start(loading, asked, Memory())
    said["run"] = outcome(run)
    said["fork"] = outcome(site.runs.start(loading, asked, Memory(), Siblings(run.trace, (0,), 1)))
    said["score"] = outcome(site.runs.read(loading, asked))
    name, tokens = loading.models.target.name, [5, 9, 2, 7]
    said["look"] = len(site.runs.look(asked, name, tokens, 3)["layers"])
    said["attributed"] = sorted(site.runs.attribute(asked, name, tokens, 4, 3))
    said["refused"] = refusal(lambda: outcome(site.runs.read(loading, Settings(prompt="a", dtype="float32"))))
    answers["/schedule"] = (200, ALLOWED | {"idle": False})  # so that a process is forked that has what comes now
    site.runs.work.prepare = ending_early(site.prepare)
    said["ended early"] = outcome(site.runs.start(loading, asked, Memory()))
    answers["/schedule"] = (429, QUOTA)
    said["quota"] = refusal(lambda: outcome(site.runs.start(loading, asked, Memory())))
    said["quantised"] = refusal(lambda: site.chosen.load(replace(asked, quantization="nf4")).result())
    said["requests"] = requests
    print(json.dumps(said))


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main(sys.argv[1])
