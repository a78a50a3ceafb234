"""Load beside attackers: quiet visitors run and run, while each attacker in turn does what it can to the public page.

    python tools/load_attacks.py [--visitors 30] [--seconds 180] [--think 5] [--only NAME ...] [--list] [--out FILE]

The page is started here with the bundled models, once for each attacker, in public mode. Every visitor has a loopback
address of its own (Linux); an attacker has four, and a process of its own. The result is one row of a table for each
attacker, and exit code 1 where a visitor waited longer than MOST_GAP between two tokens, a run was lost, a visitor was
refused, the server ended or its log has a traceback. Run it on a machine that does nothing else.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from urllib.parse import urlsplit

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from attacks import ATTACKS
from visitor import Server, TurnedAway, Visitor, request, start_page

MOST_GAP = 2.0  # seconds between two tokens of a quiet visitor
LENGTH = 64  # tokens of a run
SOURCES = ("127.0.0.66", "127.0.0.67", "127.0.0.68", "127.0.0.69")  # of an attacker
HEAD = "POST /gradio_api/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{more}\r\n\r\n"
FORM = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.jsonl"\r\n\r\n%s\r\n--b--\r\n'


# --- attackers: each does its worst once, and is called again until the time is over ---

def lines(port: int, many: int, text: bytes) -> Iterator[socket.socket]:
    """Connections from all sources in turn, on each of which a text was sent."""
    for source in (source for source, _ in zip(cycle(SOURCES), range(many))):
        with suppress(OSError):
            line = socket.create_connection(("127.0.0.1", port), timeout=2, source_address=(source, 0))
            line.sendall(text)
            yield line


def hold(port: int, many: int, text: bytes, seconds: float = 3.0, again: bytes = b"") -> None:
    """Hold many connections open on which a text was sent, and send more on each."""
    with ExitStack() as held:
        opened = [held.enter_context(line) for line in lines(port, many, text)]
        for line in opened * bool(again):
            with suppress(OSError):
                line.sendall(again)
        time.sleep(seconds)


def head(path: str, more: str, kind: str = "application/json") -> bytes:
    return HEAD.format(path=path, kind=kind, more=more).encode()


def small_chunks(port: int) -> None:
    for line in lines(port, 8, head("queue/join", "Transfer-Encoding: chunked")):
        with suppress(OSError), line:
            for _ in range(30):
                line.sendall(b"1\r\nx\r\n" * 10_000)


def half_heads(port: int) -> None:
    hold(port, 1000, b"GET / HTTP/1.1\r\nHost: loc")


def unfinished_bodies(port: int) -> None:
    start = head("upload", "Content-Length: 5000000", "multipart/form-data; boundary=b")
    hold(port, 200, start, again=b"a" * 4_999_000)


def unread_answers(port: int) -> None:
    hold(port, 400, b"GET /config HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)


def open_streams(port: int) -> None:
    hold(port, 1000, f"GET /gradio_api/heartbeat/{secrets.token_hex(4)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


def asked(port: int, many: int, each: Callable[[httpx.Client, int], object]) -> None:
    """Requests one after another, from one source after another."""
    source = random.choice(SOURCES)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10,
                      transport=httpx.HTTPTransport(local_address=source)) as client:
        for number in range(many):
            with suppress(httpx.HTTPError):
                each(client, number)


def new_hosts(port: int) -> None:
    places = cycle(("/", "/config", "/gradio_api/info", "/?unknown=1"))
    asked(port, 50, lambda client, _: client.get(next(places), headers={"host": f"{secrets.token_hex(4)}.example"}))


def new_sessions(port: int) -> None:
    def join(client: httpx.Client, _: int) -> None:
        client.post("/gradio_api/queue/join", json={"fn_index": 0, "data": [], "session_hash": secrets.token_hex(5)})
    asked(port, 50, join)


def uploads(port: int) -> None:
    def upload(client: httpx.Client, _: int) -> None:
        body = FORM % secrets.token_bytes(2_000_000)
        client.post("/gradio_api/upload", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    asked(port, 10, upload)


def text(name: str) -> Callable[[int], None]:
    """One of the malicious requests of tests/attacks.py, each time in a new session."""
    attack = next(attack for attack in ATTACKS if attack.name == name)

    async def send(port: int) -> None:
        async with Visitor(f"http://127.0.0.1:{port}", random.choice(SOURCES)) as visitor:
            await visitor.configure()
            await asyncio.wait_for(attack.prepare(visitor)(visitor), 20)

    def once(port: int) -> None:
        with suppress(TurnedAway, httpx.HTTPError, TimeoutError):
            asyncio.run(send(port))
    return once


CONNECTIONS = {
    "nobody": lambda port: time.sleep(1),
    "one-byte chunks": small_chunks,
    "half-sent heads": half_heads,
    "unfinished bodies of 5 MB": unfinished_bodies,
    "answers that are never read": unread_answers,
    "open streams": open_streams,
    "a new host for every request": new_hosts,
    "a new session for every request": new_sessions,
    "uploads": uploads,
}
ATTACKERS = CONNECTIONS | {attack.name: text(attack.name) for attack in ATTACKS}


def attack_until(name: str, port: int, until: float) -> None:
    while time.time() < until:
        with suppress(OSError):
            ATTACKERS[name](port)


@contextmanager
def attacking(name: str, port: int, seconds: float) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(
        target=attack_until, args=(name, port, time.time() + seconds), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


# --- quiet visitors ---

@dataclass
class Seen:
    """What all quiet visitors have seen; times in seconds."""

    attacker: str
    visitors: int
    ended: int = 0
    lost: list[str] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # the longest of each run
    grown_mb: float = 0.0
    alive: bool = True
    tracebacks: int = 0

    @property
    def holds(self) -> bool:
        kept = self.alive and not self.lost and not self.tracebacks
        return bool(kept and self.gaps and max(self.gaps) <= MOST_GAP)

    def row(self) -> str:
        first = sorted(self.firsts)[int(0.95 * (len(self.firsts) - 1))] if self.firsts else float("nan")
        longest = max(self.gaps, default=float("nan"))
        above = sum(gap > MOST_GAP for gap in self.gaps)
        return (f"| {self.attacker} | {self.visitors} | {self.ended} | {len(self.lost)} | {first:.2f} s "
                f"| {longest:.2f} s | {above} | {self.grown_mb:+.0f} MB | {'yes' if self.holds else 'NO'} |")


TABLE = """| attacker | visitors | runs ended | lost | first token, p95 | longest gap | gaps > 2 s | memory | holds |
|---|---|---|---|---|---|---|---|---|"""


async def visit(seen: Seen, address: str, number: int, until: float, think: float) -> None:
    chance = random.Random(number)
    while time.monotonic() < until:
        await asyncio.sleep(chance.uniform(0, 2 * think))
        async with Visitor(address, source=f"127.0.1.{1 + number}") as visitor:
            try:
                await visitor.open()
                await run_once(seen, visitor)
            except (TurnedAway, httpx.HTTPError, OSError, TimeoutError) as trouble:
                seen.lost.append(f"{type(trouble).__name__}: {trouble}"[:200])


async def run_once(seen: Seen, visitor: Visitor) -> None:
    """One run; lost unless it ends."""
    sent = last = time.monotonic()
    gap, begun, ended = 0.0, False, False
    async with aclosing(visitor.ask("run", request(prompt="The green bird", length=LENGTH))) as answers:
        async for message in answers:
            if message.has_tokens:
                if begun:
                    gap = max(gap, message.at - last)
                else:
                    seen.firsts.append(message.at - sent)
                begun, last = True, message.at
            ended = ended or message.ends_run
    if ended:
        seen.ended += 1
        seen.gaps.append(gap)
    else:
        seen.lost.append("the run did not end")


async def crowd(seen: Seen, server: Server, given: argparse.Namespace) -> None:
    until, before = time.monotonic() + given.seconds, server.footprint()["mb"]
    visits = [visit(seen, server.address, number, until, given.think) for number in range(given.visitors)]
    crowd = asyncio.gather(*visits)
    while not crowd.done():
        seen.alive = server.alive
        seen.grown_mb = max(seen.grown_mb, server.footprint()["mb"] - before) if seen.alive else seen.grown_mb
        await asyncio.wait([crowd], timeout=1)
    await crowd


def beside(name: str, given: argparse.Namespace) -> Seen:
    """What the visitors of a fresh page see beside one attacker."""
    server, seen = start_page(), Seen(name, given.visitors)
    try:
        with attacking(name, urlsplit(server.address).port, given.seconds):
            asyncio.run(crowd(seen, server, given))
        seen.alive, seen.tracebacks = server.alive, server.tracebacks()
    finally:
        server.stop()
    return seen


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--visitors", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=180.0, help="of load beside each attacker")
    parser.add_argument("--think", type=float, default=5.0, help="mean seconds between a visitor's runs")
    parser.add_argument("--only", nargs="+", default=list(CONNECTIONS), choices=list(ATTACKERS), metavar="NAME",
                        help="attackers; those on connections if not given, `--list` prints all")
    parser.add_argument("--list", action="store_true", help="print the names of all attackers")
    parser.add_argument("--out", type=Path, help="where all figures go as JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    given = options(arguments)
    if given.list:
        print("\n".join(ATTACKERS))
        return 0
    print(TABLE, flush=True)
    everything = []
    for name in given.only:
        everything.append(seen := beside(name, given))
        print(seen.row(), *(f"  lost: {why}" for why in seen.lost[:3]), sep="\n", flush=True)
    if given.out:
        given.out.write_text(json.dumps([asdict(seen) for seen in everything], indent=1), encoding="utf-8")
    return int(not all(seen.holds for seen in everything))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
