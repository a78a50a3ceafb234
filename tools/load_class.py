"""A class under load: how far behind the presenter's run the frames reach many followers.

    python tools/load_class.py [--followers 40] [--tokens 400] [--runs 3]

The page is started here with `--classroom` and the bundled models. Followers are real clients, in this process: each
joins with the code and reads its stream. Every frame says when its oldest event was made (`oldest_at`, Unix seconds);
its delay is the time from then until a follower has read it, encoding, waiting and reading included. The promise is a
95th percentile of at most 200 ms. A follower must have got every event of every run. Exit code 1 where either is
broken.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from load_page import CONTROLS, page_run  # noqa: E402
from load_summary import percentile  # noqa: E402
from visitor import Visitor  # noqa: E402

MOST = 0.2  # seconds behind, at the 95th percentile
LANES = [{"strategy": "greedy"}, {"strategy": "speculative"}, {"strategy": "sample"}]


@dataclass
class Received:
    """What one follower has got."""

    delays: list[float] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)  # by run
    over: set[str] = field(default_factory=set)  # runs whose last frame has come
    bytes: int = 0


def start() -> tuple[subprocess.Popen, dict[str, str]]:
    """The app, and the links and the code it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "app.py", "--classroom", "--host", "127.0.0.1", "--port", port]
    app = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found: dict[str, str] = {}
    while "Code" not in found:
        line = app.stdout.readline()
        if not line:
            raise RuntimeError("the app ended before its class was open")
        if known := re.match(r"(Presenter|Class|Code)[^:]*: +(.*)", line):
            found[known[1]] = known[2]
    threading.Thread(target=app.stdout.read, daemon=True).start()
    return app, found


async def follow(link: str, code: str, follower: Received) -> None:
    """Join the class and read its stream until cancelled."""
    async with httpx.AsyncClient(base_url=link, timeout=60) as client:
        joined = await client.post("/classroom/join", json={"code": code})
        joined.raise_for_status()
        async with client.stream("GET", "/classroom/stream") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    take(follower, line[6:])


def take(follower: Received, text: str) -> None:
    now, frame = time.time(), json.loads(text)
    follower.bytes += len(text)
    if "run" not in frame:
        return
    follower.events[frame["run"]] = follower.events.get(frame["run"], 0) + len(frame["events"])
    if frame.get("oldest_at"):
        follower.delays.append(now - frame["oldest_at"])
    if frame["state"] == "done":
        follower.over.add(frame["run"])


async def present(address: str, link: str, tokens: int, runs: int) -> None:
    """Press Run a few times, as the presenter's browser does, and read each run to its end."""
    async with Visitor(address) as visitor:
        await visitor.http.get(link.removeprefix(address))  # sets the cookie
        function = page_run(await visitor.configure())
        visitor.functions["page_run"] = function
        values = {"prompt": "Tell me a story about Mia.", "mode": "chat", "system": "", "context": "", "length": tokens,
                  "stop": "", "model": "default", "draft": "default", "dtype": "auto", "quantization": "none",
                  "lanes": LANES, "before": [], "form": "", "tools": ""}
        for _ in range(runs):
            data = [None, *({**values, "seed": secrets.randbelow(1000)}[name] for name in CONTROLS)]
            async for _message in visitor.ask("page_run", data, 300.0):
                pass


async def measure(found: dict[str, str], given: argparse.Namespace) -> tuple[list[Received], float]:
    """What each follower got, and the seconds that it took."""
    address, class_ = found["Class"].removesuffix("/classroom"), [Received() for _ in range(given.followers)]
    following = [asyncio.create_task(follow(address, found["Code"], follower)) for follower in class_]
    await asyncio.sleep(1)
    begun = time.monotonic()
    await present(address, found["Presenter"], given.tokens, given.runs)
    seconds, deadline = time.monotonic() - begun, time.monotonic() + 10
    while any(len(follower.over) < given.runs for follower in class_) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    for task in following:
        task.cancel()
    ended = await asyncio.gather(*following, return_exceptions=True)
    broken = [str(reason) for reason in ended if not isinstance(reason, asyncio.CancelledError)]
    if broken:
        raise RuntimeError(f"{len(broken)} followers were lost: {broken[0]}")
    return class_, seconds


def summary(class_: list[Received], seconds: float) -> tuple[str, bool]:
    """The figures as text, and whether the promises are kept."""
    delays = [delay for follower in class_ for delay in follower.delays]
    complete = all(follower.events == class_[0].events and follower.over for follower in class_)
    p95 = percentile(delays, 0.95)
    rate = sum(follower.bytes for follower in class_) / seconds / 1e6
    text = (f"{len(class_)} followers, {len(class_[0].over)} runs, {sum(class_[0].events.values())} events in "
            f"{seconds:.1f} s: behind by p50 {1000 * statistics.median(delays):.0f} ms, p95 {1000 * p95:.0f} ms, "
            f"at most {1000 * max(delays):.0f} ms over {len(delays)} frames; {rate:.1f} MB/s; "
            f"{'every follower got every event' if complete else 'EVENTS WERE LOST'}")
    return text, complete and p95 <= MOST


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--followers", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args(arguments)
    app, found = start()
    try:
        text, kept = summary(*asyncio.run(measure(found, given)))
    finally:
        app.terminate()
        app.wait(30)
    print(text)
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
