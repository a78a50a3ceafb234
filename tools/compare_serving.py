"""Compares what one visitor waits for on the page of an earlier commit and on the page as it is here.

    python tools/compare_serving.py COMMIT [--rounds 5] [--asks 20] [--runs 3] [--slack 0.1]

In each round the page of the commit (unpacked into a temporary folder) and the one of this folder are started in turn,
in public mode with the bundled models. Measured are, over plain HTTP: the first byte of the page and of Gradio's config
on a new connection, the first token of a run, and its tokens per second. Exit code 1 where the median here is worse by
more than `--slack` (a share). Run it on a machine that does nothing else.
"""
from __future__ import annotations

import argparse
import asyncio
import http.client
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import aclosing
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the file is run as a script

from visitor import COMMIT, Server, Visitor, request, start_page  # noqa: E402

PAGES = {"/": "first byte of /, ms", "/config": "first byte of /config, ms"}
FIRST, RATE = "first token of a run, ms", "tokens per second"
LENGTH = 256  # tokens of a run
Readings = dict[str, list[float]]


def unpacked(commit: str, folder: str) -> Path:
    """The files of a commit."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "x", "-C", folder], input=packed, check=True)
    return Path(folder)


def first_byte(server: Server, path: str) -> float:
    """Milliseconds from the connection to the head of the answer."""
    connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=30)
    begun = time.monotonic()
    connection.request("GET", path, headers={"Accept-Encoding": "br"})
    answer = connection.getresponse()
    seconds = time.monotonic() - begun
    answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} answered {answer.status}")
    return 1000 * seconds


async def one_run(server: Server) -> tuple[float, float]:
    """Milliseconds to the first token of a run, and its tokens per second from then on."""
    async with Visitor(server.address) as visitor:
        await visitor.configure()
        asked, counted = time.monotonic(), []
        async with aclosing(visitor.ask("run", request(prompt="The green bird", length=LENGTH))) as messages:
            async for message in messages:
                if tokens := message.raw.count(COMMIT):
                    counted.append((message.at, tokens))
    (first, at_once), (last, _) = counted[0], counted[-1]
    tokens = sum(tokens for _, tokens in counted)
    if tokens < LENGTH // 2:
        raise RuntimeError(f"the run ended after {tokens} tokens")
    return 1000 * (first - asked), (tokens - at_once) / (last - first)


def measure(root: Path, given: argparse.Namespace, found: Readings) -> None:
    """Start the page in `root` and add its readings."""
    server = start_page(root=root)
    try:
        asyncio.run(one_run(server))  # imports what is imported late
        for path, name in PAGES.items():
            first_byte(server, path)  # makes the page
            found[name] += [first_byte(server, path) for _ in range(given.asks)]
        for _ in range(given.runs):
            first, rate = asyncio.run(one_run(server))
            found[FIRST].append(first)
            found[RATE].append(rate)
    finally:
        server.stop()


def row(name: str, before: list[float], now: list[float], slack: float) -> tuple[str, bool]:
    """One line of the table, and whether it is no worse."""
    old, new = median(before), median(now)
    worse = old / new - 1 if name == RATE else new / old - 1
    return f"| {name} | {old:.1f} | {new:.1f} | {-worse:+.1%} | {'yes' if worse <= slack else 'NO'} |", worse <= slack


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--asks", type=int, default=20, help="requests of each page in a round")
    parser.add_argument("--runs", type=int, default=3, help="runs in a round")
    parser.add_argument("--slack", type=float, default=0.1, help="share by which a median may be worse")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    given = options(arguments)
    before, now = defaultdict(list), defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        earlier = unpacked(given.commit, folder)
        for number in range(given.rounds):
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
            measure(earlier, given, before)
            measure(ROOT, given, now)
    rows = [row(name, before[name], now[name], given.slack) for name in before]
    print(f"| median | {given.commit} | here | better by | no worse |\n|---|---|---|---|---|")
    print("\n".join(text for text, _ in rows))
    return int(not all(kept for _, kept in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
