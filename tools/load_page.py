"""Load: visitors who come, run, hold, read slowly, leave and come back, against the page in public mode.

    python tools/load_page.py [--visitors 50] [--minutes 10] [--think 10] [--requests 40] [--seed 0] [--out load.json]

The page is started here, on 127.0.0.1, with the bundled models; every visitor has a loopback address of its own
(Linux), since a public page gives each client a share. Visitors are real clients: six in ten open the page as a browser
does (GET /, the heartbeat stream, Gradio's queue, the act behind "Run"), the others use the endpoints `run` and
`compare`.

**The ideal share of the machine.** Before the load, one visitor sends each of the `--requests` different requests alone
and notes the time to its first token, `first`, and to its end, `work`. When a request is sent while `n` other runs are
under way, at most `SEATS` of which the page serves at once, its ideal first token comes after

    first * (1 + min(n, SEATS - 1)) + mean(work) * max(0, n - SEATS + 1)

seconds: its own work stretched by those it takes turns with, after as many runs ended as stand before it in the line.
The promise is p95(first token) <= 2 * p95(ideal).

Exit code 1 where that is broken, or: an answer other than a run or a polite refusal (a sentence, or HTTP 429 or 503);
an internal error shown to a visitor or a traceback in the log; a run that was begun and did not end; fewer than half of
the requests served; memory that grew by more than 5 % after the first fifth of the time; threads, handles or child
processes left over; a server that is still busy when everybody has left, or ends.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from load_summary import Load, Outcome, Request, summary, summary_text
from random_requests import CONTEXT, PROMPTS, random_lane
from visitor import Message, Server, TurnedAway, Visitor, request, start_page

LONGEST = 300.0  # seconds of one run, waiting included
SAMPLE = 2.0  # seconds between two looks at the server's memory
REST = 13.0  # seconds after which idle worker threads are ended by the next request (anyio ends them after 10)
HABITS = ("reads", "reads", "reads", "reads", "reads", "reads", "leaves", "leaves", "holds", "slow")
CONTROLS = (
    "prompt",
    "mode",
    "system",
    "context",
    "seed",
    "length",
    "stop",
    "model",
    "draft",
    "dtype",
    "quantization",
    "lanes",
    "before",
    "form",
    "tools",
)
REFUSED = ("429", "503")


# --- one request ---

def arguments(asked: Request, seed: int) -> list[Any]:
    return request(prompt=asked.prompt, lanes=asked.lanes, context=asked.context, seed=seed, length=asked.length)


def controls(asked: Request, seed: int) -> list[Any]:
    """The page's own function takes the visitor's state, which the server puts in, and every control."""
    values = {
        "prompt": asked.prompt,
        "mode": "raw",
        "system": "",
        "context": asked.context,
        "seed": seed,
        "length": asked.length,
        "stop": "",
        "model": "default",
        "draft": "default",
        "dtype": "auto",
        "quantization": "none",
        "lanes": asked.lanes,
        "before": [],
        "form": "",
        "tools": "",
    }
    return [None, *(values[name] for name in CONTROLS)]


class Reader:
    """Reads the messages of one request and notes what they mean."""

    def __init__(self, habit: str, function: str, sent: float, ideal: float | None):
        said = "the stream ended without an answer"
        self.outcome, self.sent = Outcome("broken", habit, ideal=ideal, said=said, function=function), sent
        self.ended = False

    def read(self, message: Message) -> None:
        outcome = self.outcome
        outcome.seconds = message.at - self.sent
        if message.internal_error:
            outcome.said = message.internal_error
        if outcome.seated is None and '\\"headers\\":' in message.raw:
            outcome.seated = outcome.seconds
        self.ended = self.ended or message.ends_run
        if message.has_tokens and outcome.first is None:
            outcome.first = outcome.seconds
        if message.kind == "process_completed":
            self._complete(message)
        elif message.kind in ("unexpected_error", "server_stopped"):
            outcome.said = message.raw[:300]

    def _complete(self, message: Message) -> None:
        sentences = message.sentences()
        answered = self.ended or ('"success":true' in message.raw.replace(" ", "") and not sentences)
        if not self.outcome.said.startswith("the stream"):
            return  # an internal error was shown
        self.outcome.end = "done" if answered else "refused" if sentences else "broken"
        self.outcome.said = "" if answered else (sentences or [message.raw])[0][:300]


async def once(
    load: Load, visitor: Visitor, asked: Request, chance: random.Random, habit: str, function: str
) -> Outcome:
    """Send a request and see it to its end, or leave in its middle."""
    data = (
        controls(asked, chance.randrange(1000)) if function == "page_run" else arguments(asked, chance.randrange(1000))
    )
    sent = time.monotonic()
    reader = Reader(habit, function, sent, load.ideal(asked))
    load.running += 1
    leaving = sent + chance.uniform(0.2, 2.0) if habit == "leaves" else math.inf
    try:
        async with aclosing(visitor.ask(function, data, LONGEST)) as messages:
            await _follow(messages, reader, visitor, leaving, chance)
    except (TurnedAway, httpx.HTTPError, TimeoutError) as trouble:
        _fail(reader.outcome, trouble)
    finally:
        load.running -= 1
    return reader.outcome


async def _follow(
    messages: AsyncIterator[Message], reader: Reader, visitor: Visitor, leaving: float, chance: random.Random
) -> None:
    held = reader.outcome.habit != "holds"
    async for message in messages:
        reader.read(message)
        if message.at > leaving:
            reader.outcome.end, reader.outcome.said = "left", ""
            return
        if not held and message.has_tokens and "hold" in visitor.functions:
            held = True
            await _hold_for_a_while(visitor, chance)


async def _hold_for_a_while(visitor: Visitor, chance: random.Random) -> None:
    """Press Hold and later Resume; what is sent meanwhile waits in the connection."""
    await visitor.call("hold", [None])
    await asyncio.sleep(chance.uniform(0.5, 3.0))
    await visitor.call("resume", [None])


def _fail(outcome: Outcome, trouble: Exception) -> None:
    refused = isinstance(trouble, TurnedAway) and str(trouble.status) in REFUSED
    outcome.end, outcome.said = "refused" if refused else "broken", f"{type(trouble).__name__}: {trouble}"[:300]


# --- a visitor's day ---

async def visit(load: Load, number: int, chance: random.Random) -> None:
    """Come, run a few times with time to think in between, leave, and come again as somebody else."""
    while time.monotonic() < load.until:
        await asyncio.sleep(chance.uniform(0, load.think))
        async with Visitor(load.server.address, source=f"127.0.{1 + number // 250}.{1 + number % 250}") as visitor:
            await _stay(load, visitor, chance)


async def _stay(load: Load, visitor: Visitor, chance: random.Random) -> None:
    function, heart = chance.choice(("page_run", "page_run", "page_run", "run", "compare")), None
    try:
        await _open(load, visitor)
    except (TurnedAway, httpx.HTTPError) as trouble:
        load.outcomes.append(Outcome("broken", "opens", said=f"{type(trouble).__name__}: {trouble}"[:300]))
        return
    if function == "page_run":
        heart = asyncio.create_task(visitor.heartbeat())
    try:
        await _runs(load, visitor, chance, function)
    finally:
        if heart:
            heart.cancel()
            with suppress(asyncio.CancelledError, httpx.HTTPError):
                await heart


async def _runs(load: Load, visitor: Visitor, chance: random.Random, function: str) -> None:
    for _ in range(chance.randint(1, 4)):
        if time.monotonic() >= load.until:
            return
        habit = chance.choice(HABITS)
        visitor.slow = chance.uniform(0.1, 0.4) if habit == "slow" else 0.0
        outcome = await once(
            load,
            visitor,
            chance.choice(load.requests),
            chance,
            habit if function == "page_run" or habit != "holds" else "reads",
            function,
        )
        load.outcomes.append(outcome)
        if outcome.end == "left":
            return
        await asyncio.sleep(chance.expovariate(1 / load.think))


async def _open(load: Load, visitor: Visitor) -> None:
    await visitor.open()
    functions = await visitor.configure()
    visitor.functions["page_run"] = page_run(functions)
    load.pages += 1


def page_run(functions: list[dict[str, Any]]) -> int:
    """Number of the act behind the button Run: the first that takes the visitor's state and every control."""
    return next(
        one["id"]
        for one in functions
        if len(one["inputs"]) == 1 + len(CONTROLS) and one["targets"] and one["targets"][0][1] == "click"
    )


# --- the whole load ---

async def choose_requests(server: Server, count: int, chance: random.Random) -> list[Request]:
    """Different requests, each with what it took a lone visitor; of those that are refused one in five stays."""
    async with Visitor(server.address) as visitor:
        await visitor.configure()
        facts, found = (await visitor.call("strategies", [""]))[0], []
        alone = Load(server, [], 0, math.inf)
        while len(found) < count:
            asked = _random_request(facts, chance)
            outcome = await once(alone, visitor, asked, chance, "reads", "run")
            if outcome.end == "broken":
                raise RuntimeError(f"a lone visitor was refused ({outcome.said}) for {asked.lanes}")
            asked.first, asked.work = outcome.first, outcome.seconds
            if outcome.first is not None or chance.random() < 0.2:
                found.append(asked)
    return found


def _random_request(facts: list[dict[str, Any]], chance: random.Random) -> Request:
    lanes = [random_lane(facts, chance) for _ in range(chance.choice((1, 1, 2)))]
    return Request(lanes, chance.choice(PROMPTS), chance.choice(("", CONTEXT)), chance.randint(8, 48))


async def run_load(server: Server, given: argparse.Namespace) -> tuple[Load, dict[str, float], dict[str, float], float]:
    """The load; what the server held before and after, and how busy it was in the end, in percent of a core."""
    chance = random.Random(given.seed)
    requests = await choose_requests(server, given.requests, chance)
    await asyncio.sleep(min(REST, given.rest))
    before = server.footprint()
    load = Load(server, requests, given.think, time.monotonic() + 60 * given.minutes)
    watcher = asyncio.create_task(_watch(load))
    await asyncio.gather(
        *(visit(load, number, random.Random(f"{given.seed} {number}")) for number in range(given.visitors))
    )
    watcher.cancel()
    await asyncio.sleep(given.rest)
    busy = await _busy(server)
    await choose_requests(server, 2, chance)  # the next requests end threads that were idle for long
    await asyncio.sleep(1)
    return load, before, server.footprint() if server.alive else {}, busy


async def _busy(server: Server) -> float:
    """Percent of a core that the server uses with nobody there."""
    if not server.alive:
        return 0.0
    process = psutil.Process(server.process.pid)
    process.cpu_percent()
    await asyncio.sleep(2)
    return process.cpu_percent()


async def _watch(load: Load) -> None:
    start = time.monotonic()
    while load.server.alive:
        with suppress(psutil.Error):
            load.samples.append({"at": time.monotonic() - start, "running": load.running, **load.server.footprint()})
        await asyncio.sleep(SAMPLE)


def options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--visitors", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--think", type=float, default=10.0, help="mean seconds between a visitor's runs")
    parser.add_argument(
        "--requests", type=int, default=40, help="different requests, each measured alone before the load"
    )
    parser.add_argument(
        "--rest", type=float, default=REST, help="seconds after the load before the server is looked at"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="where the figures go as JSON, every request and memory sample included"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    given, server = options(arguments), start_page()
    try:
        load, before, after, busy = asyncio.run(run_load(server, given))
        found = summary(load, before, after, busy)
    finally:
        server.stop()
    if given.out:
        whole = {
            **found,
            "samples": load.samples,
            "outcomes": [asdict(one) for one in load.outcomes],
            "asked": [asdict(one) for one in load.requests],
        }
        given.out.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    print(summary_text(found))
    return bool(found["violations"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
