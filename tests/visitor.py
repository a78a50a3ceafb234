"""Visitors of the page as its server sees them: plain HTTP and Gradio's queue protocol, no browser.

    with public_page() as server:
        async with Visitor(server.address) as visitor:
            async for message in visitor.ask("run", request(length=32)): ...

A message is one line of the event stream. Frames of a run stay unparsed, since a load test reads hundreds of them a
second; what they hold is looked for in the text. Each visitor can have a loopback address of its own (127.0.0.0/8,
Linux), because a server may count requests per client address.
"""
from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[1]
API = "/gradio_api"
STARTUP = 120  # seconds for the imports and the models
LAST = ("process_completed", "unexpected_error", "server_stopped", "close_stream")
# as in a frame, which is JSON within JSON
COMMIT, DONE = '\\"kind\\":\\"commit\\"', '\\"state\\":\\"done\\"'
INTERNAL = ("Traceback (most recent", "unexpected error (", "failed with an internal error")
ARGUMENTS = {
    "prompt": "The red fox",
    "lanes": [{"strategy": "greedy"}],
    "seed": 0,
    "length": 64,
    "mode": "raw",
    "system": "",
    "stop": "",
    "context": "",
    "model": "default",
    "draft": "default",
    "before": None,
    "remote": "",
    "remote_model": "",
    "remote_key": "",
    "form": "",
    "tools": "",
    "dtype": "auto",
    "quantization": "none",
}


def request(**changes: Any) -> list[Any]:
    """Arguments of the endpoints `run` and `compare`, in their order."""
    return list((ARGUMENTS | changes).values())


class TurnedAway(Exception):
    """The server answered a request with an HTTP error; `status` and the detail it gave."""

    def __init__(self, status: int, detail: str):
        super().__init__(f"HTTP {status}: {detail[:300]}")
        self.status, self.detail = status, detail


@dataclass(frozen=True)
class Message:
    """One message of an event stream, and when it arrived (time.monotonic)."""

    at: float
    kind: str
    raw: str

    @property
    def has_tokens(self) -> bool:
        return COMMIT in self.raw

    @property
    def ends_run(self) -> bool:
        return DONE in self.raw

    @property
    def internal_error(self) -> str:
        """The part of the message that shows an internal error to a visitor; empty where none does."""
        at = max(self.raw.find(sign) for sign in INTERNAL)
        return self.raw[max(0, at - 80):at + 200] if at >= 0 else ""

    def sentences(self) -> list[str]:
        """The error of an endpoint, and every notice among the page's outputs."""
        output = json.loads(self.raw).get("output") or {}
        error = [output["error"]] if isinstance(output.get("error"), str) else []
        notices = [text for value in output.get("data") or [] for text in _texts(value)]
        return [*error, *(text for text in notices if is_sentence(text))]


def is_sentence(text: str) -> bool:
    """Whether a text is a sentence for people: words up to a full stop, no markup, no traceback."""
    return bool(re.fullmatch(r"[^<]*\w+ \w+[^<]*[.!]", text)) and not any(sign in text for sign in INTERNAL)


def _texts(value: Any) -> list[str]:
    """Plain texts of an output, which is a value or a list of [action, path, value] differences; frames are left out.
    """
    found = (
        [value]
        if isinstance(value, str)
        else [change[2] for change in value if _is_difference(change)]
        if isinstance(value, list)
        else []
    )
    return [text for text in found if isinstance(text, str) and not text.startswith("{")]


def _is_difference(change: Any) -> bool:
    return isinstance(change, list) and len(change) == 3 and isinstance(change[0], str)


class Visitor:
    """One browser or program. `source` is its own address; `slow` seconds pass before it reads the next message, from
    the first token on.
    """

    def __init__(self, address: str, source: str = "127.0.0.1", slow: float = 0.0):
        self.slow, self.session = slow, secrets.token_hex(6)
        transport = httpx.AsyncHTTPTransport(
            local_address=source, limits=httpx.Limits(max_connections=None, max_keepalive_connections=4)
        )
        self.http = httpx.AsyncClient(
            base_url=address,
            transport=transport,
            timeout=httpx.Timeout(60, read=90),
            headers={"user-agent": "load test"},
        )
        self.functions: dict[str, int] = {}

    async def __aenter__(self) -> Visitor:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def open(self) -> int:
        """Fetch the page as a browser does; bytes received."""
        page = await self._get("/")
        await self.configure()
        return len(page.content)

    async def configure(self) -> list[dict[str, Any]]:
        """The page's functions, whose numbers the queue is asked by."""
        functions = (await self._get("/config")).json()["dependencies"]
        self.functions = {function["api_name"]: function["id"] for function in functions if function["api_name"]}
        return functions

    async def call(self, name: str, data: list[Any]) -> Any:
        """The answer of an endpoint that does not wait in the queue."""
        answer = await self.http.post(f"{API}/run/predict", json={**self._body(name), "data": data})
        return _accepted(answer).json()["data"]

    async def ask(self, name: str, data: list[Any], within: float = 600.0) -> AsyncIterator[Message]:
        """Join the queue and read the answers; raises TurnedAway where the server refuses over HTTP."""
        await self.join(name, data)
        async with aclosing(self.messages(within)) as messages:
            async for message in messages:
                yield message

    async def join(self, name: str, data: list[Any]) -> str:
        """Put a request into the queue; the event's id."""
        if not self.functions:
            await self.configure()
        return await self.join_raw(json.dumps({**self._body(name), "data": data}).encode())

    async def join_raw(self, body: bytes) -> str:
        answer = await self.http.post(f"{API}/queue/join", content=body, headers={"content-type": "application/json"})
        return _accepted(answer).json()["event_id"]

    async def messages(self, within: float = 600.0) -> AsyncIterator[Message]:
        """What the server tells this session until its request has an answer; raises TimeoutError after `within`
        seconds.
        """
        end, pause = time.monotonic() + within, 0.0
        async with self.http.stream("GET", f"{API}/queue/data", params={"session_hash": self.session}) as stream:
            if stream.status_code >= 400:
                raise TurnedAway(stream.status_code, (await stream.aread()).decode("utf-8", "replace"))
            async with aclosing(stream.aiter_lines()) as lines:
                async for line in lines:
                    if line.startswith("data:"):
                        yield (message := _message(line[5:].strip()))
                        if message.kind in LAST:
                            return
                        pause = self.slow if message.has_tokens else pause
                        await asyncio.sleep(pause)
                    if time.monotonic() > end:
                        raise TimeoutError(f"no answer within {within:.0f} s")

    async def heartbeat(self) -> None:
        """Stay until cancelled: the stream by which the server sees that a page is open."""
        async with self.http.stream("GET", f"{API}/heartbeat/{self.session}", timeout=None) as stream:
            async for _ in stream.aiter_lines():
                pass

    def _body(self, name: str) -> dict[str, Any]:
        return {"fn_index": self.functions[name], "session_hash": self.session}

    async def _get(self, path: str) -> httpx.Response:
        return _accepted(await self.http.get(path))


def _accepted(answer: httpx.Response) -> httpx.Response:
    if answer.status_code >= 400:
        raise TurnedAway(answer.status_code, answer.text)
    return answer


def _message(raw: str) -> Message:
    kind = re.search(r'"msg": ?"(\w+)"', raw)
    return Message(time.monotonic(), kind[1] if kind else "", raw)


@dataclass
class Server:
    """The page in a process of its own."""

    address: str
    process: subprocess.Popen
    log: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    tracebacks: int = 0  # in all that was logged

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def footprint(self) -> dict[str, float]:
        """Resident memory in MB, threads and handles of the process, and how many children it has; their memory counts
        too.
        """
        own = psutil.Process(self.process.pid)
        children = own.children(recursive=True)
        resident = own.memory_info().rss + sum(_resident(child) for child in children)
        return {
            "mb": resident / 2**20,
            "threads": own.num_threads(),
            "handles": own.num_fds(),
            "children": len(children),
        }

    def note(self, lines: Iterable[str]) -> None:
        """Keep the last lines of the log, and count tracebacks."""
        for line in lines:
            self.log.append(line)
            self.tracebacks += line.startswith("Traceback (most recent")

    def stop(self) -> int:
        """End the process as a service manager does; its exit code."""
        if self.alive:
            self.process.terminate()
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait(10)

    def kill(self) -> None:
        with_children = psutil.Process(self.process.pid).children(recursive=True) if self.alive else []
        for child in with_children:
            child.kill()
        self.process.kill()


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def start_page(public: bool = True, threads: int = 0, root: Path = ROOT) -> Server:
    """Start `python app.py` of the checkout `root` with the bundled models and wait until they are loaded; raises
    RuntimeError where it does not come up.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    surroundings = (
        os.environ
        | {"PLAYGROUND_PUBLIC": "1" if public else "0", "PYTHONUNBUFFERED": "1"}
        | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    )
    process = subprocess.Popen(
        [sys.executable, "app.py", "--host", "127.0.0.1", "--port", str(port)],
        cwd=root,
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    server = Server(f"http://127.0.0.1:{port}", process)
    while "Running on" not in (line := process.stdout.readline()):
        server.note([line])
        if not line:
            raise RuntimeError(f"the page did not start: {''.join(server.log)[-500:]}")
    threading.Thread(target=server.note, args=(process.stdout,), daemon=True).start()
    _wait_for_models(server)
    return server


def _wait_for_models(server: Server) -> None:
    """Wait for the models with one short run."""
    async def first_run() -> None:
        async with Visitor(server.address) as visitor:
            async for _ in visitor.ask("run", request(length=2), within=STARTUP):
                pass
    asyncio.run(first_run())


@contextmanager
def public_page(threads: int = 0) -> Iterator[Server]:
    """The page in public mode for as long as the context is open."""
    server = start_page(threads=threads)
    try:
        yield server
    finally:
        server.stop()
