"""Memory of a public page that many visitors come to and leave: `python tools/measure_visitors.py http://127.0.0.1:7860
--pid PID --visitors 1000`.

Each visitor opens the page, holds a heartbeat connection as a browser does, runs a few tokens, reads the stream to its
end and leaves. Give the process id of the page: its resident memory is reported before, after, and once the sessions of
those who left have been swept.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import time

import httpx
import psutil

WARM_UP = 200  # visitors before the first measurement: they load models and fill bounded caches of the libraries
SETTLE = 90.0  # seconds until sessions of a public page are swept


class Page:
    """The page's own Run, found in its config."""

    def __init__(self, config: dict):
        self.components = {component["id"]: component for component in config["components"]}
        self.run = self._dependency(config, "run", "click")

    def _dependency(self, config: dict, elem_id: str, event: str) -> dict:
        target = next(
            number for number, component in self.components.items() if component["props"].get("elem_id") == elem_id
        )
        return next(
            listener
            for listener in config["dependencies"]
            if [target, event] in [list(pair) for pair in listener["targets"]]
        )

    def data(self, length: int) -> list:
        """What a browser sends with Run: every control as it is at first, but for the number of tokens."""
        return [
            length if self._is(number, "length") else self.components[number]["props"].get("value")
            for number in self.run["inputs"]
        ]

    def _is(self, number: int, elem_id: str) -> bool:
        return self.components[number]["props"].get("elem_id") == elem_id


async def visit(client: httpx.AsyncClient, page: Page, address: str, length: int) -> str:
    """One visitor; how the run ended: "done", or the sentence of a refusal."""
    session, headers = secrets.token_hex(6), {"x-forwarded-for": address}
    heartbeat = asyncio.create_task(beat(client, session, headers))
    try:
        await client.get("/", headers=headers)
        joined = await client.post(
            "/gradio_api/queue/join",
            headers=headers,
            json={
                "data": page.data(length),
                "fn_index": page.run["id"],
                "session_hash": session,
                "trigger_id": None,
                "event_data": None,
            },
        )
        if joined.status_code != 200:
            return joined.json().get("detail", str(joined.status_code))
        return await follow(client, session, headers)
    finally:
        heartbeat.cancel()


async def beat(client: httpx.AsyncClient, session: str, headers: dict) -> None:
    async with client.stream("GET", f"/gradio_api/heartbeat/{session}", headers=headers) as stream:
        async for _ in stream.aiter_bytes():
            pass


async def follow(client: httpx.AsyncClient, session: str, headers: dict) -> str:
    """Read a stream to its end."""
    seen = ""
    async with client.stream("GET", f"/gradio_api/queue/data?session_hash={session}", headers=headers) as stream:
        async for line in stream.aiter_lines():
            if not line.startswith("data: "):
                continue
            message = json.loads(line[6:])
            seen += line if message["msg"] == "process_generating" else ""
            if message["msg"] in ("process_completed", "close_stream", "unexpected_error"):
                break
    return (
        "done"
        if '\\"state\\":\\"done\\"' in seen or '\\"done\\"' in seen
        else "refused"
        if "busy" in seen
        else "unclear"
    )


async def crowd(client: httpx.AsyncClient, page: Page, visitors: int, at_once: int, length: int) -> dict[str, int]:
    """So many visitors, some at a time, each from an address of its own; how often each end came."""
    ends: dict[str, int] = {}
    turn = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with turn:
            address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
            try:
                end = await visit(client, page, address, length)
            except httpx.HTTPError as reason:
                end = type(reason).__name__
            ends[end] = ends.get(end, 0) + 1

    await asyncio.gather(*(one(number) for number in range(visitors)))
    return ends


def resident(pid: int) -> float:
    """Megabytes of a process with its children."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True))) / 1e6


async def measure(given: argparse.Namespace) -> None:
    async with httpx.AsyncClient(
        base_url=given.address, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as client:
        page = Page((await client.get("/config")).json())
        print("warm-up:", await crowd(client, page, WARM_UP, given.at_once, given.length))
        await asyncio.sleep(given.settle)
        before, begun = resident(given.pid), time.monotonic()
        print(f"before: {before:.0f} MB")
        ends = await crowd(client, page, given.visitors, given.at_once, given.length)
        print(
            f"{given.visitors} visitors in {time.monotonic() - begun:.0f} s: {ends}; at once after:"
            f" {resident(given.pid):.0f} MB"
        )
        await asyncio.sleep(given.settle)
        after = resident(given.pid)
        print(f"after: {after:.0f} MB, {(after / before - 1) * 100:+.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--visitors", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--settle", type=float, default=SETTLE)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
