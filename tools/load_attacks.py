"""Load beside attackers: quiet visitors run and run, while each attacker in turn does what it can to the public page.

    python tools/load_attacks.py [--visitors 30] [--seconds 180] [--think 5] [--only NAME ...] [--list] [--out FILE]

The page is started here with the bundled models, once for each attacker, in public mode. Every visitor has a loopback
address of its own (Linux); an attacker has four, and a process of its own. The result is one row of a table for each
attacker (RULE says what `holds` means), and exit code 1 where one does not hold. Progress goes to stderr. With `--out`
the figures are written after each attacker, and a second call with the same file goes on with those that are missing.
Run it on a machine that does nothing else.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from attacks import ATTACKS
from visitor import Server, TurnedAway, Visitor, request, start_page

MOST_FIRST = 15.0  # seconds from Run to the first token, most of them in the queue: there are more visitors than seats
MOST_GAP = 2.0  # seconds between two tokens of a quiet visitor
RULE = (
    f"It holds if no run of a quiet visitor waits longer than {MOST_FIRST:.0f} s for its first token or {MOST_GAP:.0f} "
    "s between two tokens, no run is lost or refused, and the server stays up without a traceback in its log, while "
    "the attacker attacks to the end."
)
LENGTH = 64  # tokens of a run
LONGEST = 120.0  # seconds after which a run counts as lost
PROGRESS = 10.0  # seconds between two lines of progress
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


def attack_for(name: str, port: int, seconds: float, times: Any) -> None:
    """Attack again and again; `times` counts how often the attacker began."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        times.value += 1
        with suppress(OSError):
            ATTACKERS[name](port)


@contextmanager
def attacking(seen: Seen, port: int, seconds: float) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that attacks; what became of it is noted in `seen`."""
    context = multiprocessing.get_context("spawn")
    times = context.Value("i", 0)
    process = context.Process(target=attack_for, args=(seen.attacker, port, seconds, times), daemon=True)
    process.start()
    try:
        yield process
        seen.attacks, seen.attacked = times.value, process.exitcode in (None, 0)
    finally:
        process.kill()
        process.join()


# --- quiet visitors ---

@dataclass
class Seen:
    """What all quiet visitors have seen; times in seconds."""

    attacker: str
    visitors: int
    attacks: int = 0
    attacked: bool = False  # to the end: an attacker that breaks off would measure nothing
    ended: int = 0
    lost: list[str] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)  # from Run to the first token of each run
    gaps: list[float] = field(default_factory=list)  # the longest between two tokens of each run
    grown_mb: float = 0.0
    alive: bool = True
    tracebacks: int = 0

    @property
    def first_holds(self) -> bool:
        return max(self.firsts, default=float("inf")) <= MOST_FIRST

    @property
    def gap_holds(self) -> bool:
        return max(self.gaps, default=float("inf")) <= MOST_GAP

    @property
    def holds(self) -> bool:
        kept = self.attacked and self.alive and not self.lost and not self.tracebacks
        return kept and self.first_holds and self.gap_holds

    def row(self) -> str:
        cells = (self.attacker, self.attacks, self.ended, len(self.lost), _seconds(_p95(self.firsts)),
                 _seconds(max(self.firsts, default=None)), _seconds(max(self.gaps, default=None)),
                 f"{self.grown_mb:+.0f} MB", "yes" if self.first_holds else "NO", "yes" if self.gap_holds else "NO",
                 "yes" if self.holds else "NO")
        return f"| {' | '.join(map(str, cells))} |"

    def progress(self) -> str:
        return (f"{self.ended} runs, {len(self.lost)} lost, longest wait for a first token "
                f"{_seconds(max(self.firsts, default=None))}, between tokens {_seconds(max(self.gaps, default=None))}")


def _p95(values: list[float]) -> float | None:
    return sorted(values)[int(0.95 * (len(values) - 1))] if values else None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


HEADINGS = ("attacker", "attacks", "runs ended", "lost", "wait for first token, p95", "longest",
            "longest gap", "memory", f"first token <= {MOST_FIRST:.0f} s", f"gaps <= {MOST_GAP:.0f} s", "holds")
TABLE = f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|"


async def visit(seen: Seen, address: str, number: int, until: float, think: float) -> None:
    chance = random.Random(number)
    while time.monotonic() < until:
        await asyncio.sleep(chance.uniform(0, 2 * think))
        async with Visitor(address, source=f"127.0.1.{1 + number}") as visitor:
            try:
                await visitor.open()
                await run_once(seen, visitor)
            except (TurnedAway, httpx.HTTPError, OSError, TimeoutError, ValueError) as trouble:
                seen.lost.append(f"{type(trouble).__name__}: {trouble}"[:200])


async def run_once(seen: Seen, visitor: Visitor) -> None:
    """One run; lost unless it ends."""
    sent = last = time.monotonic()
    gap, begun, ended, said = 0.0, False, False, []
    asked = visitor.ask("run", request(prompt="The green bird", length=LENGTH), within=LONGEST)
    async with aclosing(asked) as answers:
        async for message in answers:
            if message.has_tokens:
                if begun:
                    gap = max(gap, message.at - last)
                else:
                    seen.firsts.append(message.at - sent)
                begun, last = True, message.at
            ended = ended or message.ends_run
            said = message.sentences() if message.kind == "process_completed" and not ended else said
    if ended:
        seen.ended += 1
        seen.gaps.append(gap)
    else:
        seen.lost.append(" ".join(["the run did not end", *said])[:200])


async def crowd(seen: Seen, server: Server, given: argparse.Namespace) -> None:
    begun = time.monotonic()
    until, before, reported = begun + given.seconds, server.footprint()["mb"], begun
    visits = [visit(seen, server.address, number, until, given.think) for number in range(given.visitors)]
    crowd = asyncio.gather(*visits)
    while not crowd.done():
        await asyncio.wait([crowd], timeout=1)
        seen.alive = server.alive
        with suppress(psutil.Error):  # the server has just ended
            seen.grown_mb = max(seen.grown_mb, server.footprint()["mb"] - before)
        if (now := time.monotonic()) - reported >= PROGRESS:
            reported = now
            report(f"  {now - begun:.0f} of {given.seconds:.0f} s: {seen.progress()}")
    await crowd


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def beside(name: str, given: argparse.Namespace) -> Seen:
    """What the visitors of a fresh page see beside one attacker."""
    server, seen = start_page(), Seen(name, given.visitors)
    try:
        with attacking(seen, urlsplit(server.address).port, given.seconds):
            asyncio.run(crowd(seen, server, given))
        seen.alive, seen.tracebacks = server.alive, server.tracebacks
    finally:
        server.stop()
    return seen


# --- figures that outlive an interruption ---

def settings(given: argparse.Namespace) -> dict[str, float]:
    return {"visitors": given.visitors, "seconds": given.seconds, "think": given.think, "length": LENGTH}


def measured(given: argparse.Namespace) -> dict[str, Seen]:
    """The figures in `--out` by attacker; exits where they were measured otherwise."""
    if not given.out or not given.out.exists():
        return {}
    stored = json.loads(given.out.read_text(encoding="utf-8"))
    if stored["settings"] != settings(given):
        sys.exit(f"{given.out} was measured with {stored['settings']}: give the same settings, or another --out.")
    return {one["attacker"]: Seen(**one) for one in stored["attackers"]}


def store(found: dict[str, Seen], given: argparse.Namespace) -> None:
    """Write all figures; a call that is interrupted leaves the file as it was."""
    if given.out:
        figures = {"settings": settings(given), "rule": RULE, "attackers": [asdict(seen) for seen in found.values()]}
        part = given.out.with_name(given.out.name + ".part")
        part.write_text(json.dumps(figures, indent=1), encoding="utf-8")
        os.replace(part, given.out)


def measure(given: argparse.Namespace) -> dict[str, Seen]:
    """Measure beside the attackers that `--out` does not have yet, and print a row for each."""
    found = measured(given)
    print(f"{given.visitors} visitors for {given.seconds:.0f} s beside each attacker. {RULE}\n\n{TABLE}", flush=True)
    for number, name in enumerate(given.only, start=1):
        report(f"[{number} of {len(given.only)}] {name}" + (": measured before" if name in found else ""))
        if name not in found:
            found[name] = beside(name, given)
            store(found, given)
        print(found[name].row(), flush=True)
        for why in found[name].lost[:3]:
            report(f"  lost: {why}")
    return found


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--visitors", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=180.0, help="of load beside each attacker")
    parser.add_argument("--think", type=float, default=5.0, help="mean seconds between a visitor's runs")
    parser.add_argument("--only", nargs="+", default=list(CONNECTIONS), choices=list(ATTACKERS), metavar="NAME",
                        help="attackers; those on connections if not given, `--list` prints all")
    parser.add_argument("--list", action="store_true", help="print the names of all attackers")
    parser.add_argument("--out", type=Path, help="where all figures go as JSON; attackers that it has are skipped")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    given = options(arguments)
    if given.list:
        print("\n".join(ATTACKERS))
        return 0
    found = measure(given)
    return int(not all(found[name].holds for name in given.only))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the page and the attacker end as well
    sys.exit(main(sys.argv[1:]))
