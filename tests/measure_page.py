"""How the page does in a browser: `python tests/measure_page.py [--repeats 5] [--runs 20] [--json FILE] [--page
docs/page-speed.md]`.

The app is started as a person starts it, and a headless Chromium visits it. A script that goes into the page before its
own (measure_page.js) notes frames, paints and long tasks. Server and browser share one machine, so its clock is that of
both.
"""
from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from chromium import chromium
from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # it is started as a file

from playground.ui.settings import Settings  # noqa: E402

NOTES = (ROOT / "tests" / "measure_page.js").read_text(encoding="utf-8")
PATIENCE = 300  # seconds after which something is broken rather than slow
WINDOW = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
SLOWED = 6  # times, what a phone of some years takes where a desk does not
SCRUB = 4  # seconds the slider is drawn to and fro
WARM_UP = 5  # runs before memory is looked at for the first time
TABS = 3  # in which memory is looked at
LANES = [
    {"strategy": "greedy"},
    {"strategy": "sample"},
    {"strategy": "speculative"},
    {"strategy": "greedy", "extras": [["repetition_penalty", {}]]},
]
STORY = Settings("Once upon a time there was a king who had three sons.", length=400, lanes=LANES)
SHORT = Settings("Tell me a story about Mia.", "chat", length=48, lanes=LANES)
LONG = Settings("The green bird", length=2000, lanes=LANES)

Readings = dict[str, list[float]]


@dataclass(frozen=True)
class Measure:
    """A number that is read again and again, and what it should come to: at most or at least so much."""

    name: str
    unit: str
    most: float | None = None
    least: float | None = None

    def aim(self) -> str:
        return (
            f"at most {self.most:g}"
            if self.most is not None
            else f"at least {self.least:g}"
            if self.least is not None
            else ""
        )

    def reached(self, values: list[float]) -> str:
        if not self.aim():
            return ""
        middle = median(values)
        return (
            "yes"
            if (self.most is None or middle <= self.most) and (self.least is None or middle >= self.least)
            else "no"
        )


MEASURES = {
    "answer": Measure("`python app.py` to a page that answers", "s", most=10),
    "paint": Measure("address entered to first contentful paint", "s", most=2),
    "usable": Measure("address entered to a page with all its parts", "s"),
    "first": Measure("Run pressed to the first token on the screen", "s", most=0.5),
    "updates": Measure("four lanes: updates in the browser", "1/s", least=10),
    "blocked": Measure("four lanes: main thread blocked, of the time lanes write", "%", most=5),
    "longest": Measure("four lanes: longest task, the end of the run included", "ms"),
    "pixel": Measure("four lanes: choice to pixel, median", "ms"),
    "pixel95": Measure("four lanes: choice to pixel, 95 of 100 within", "ms", most=150),
    "shift": Measure("four lanes: layout shift of a run", "", most=0.1),
    "long_fps": Measure("four lanes of 2,000 tokens: frames while they are written", "1/s"),
    "long_blocked": Measure("four lanes of 2,000 tokens: main thread blocked", "%", most=5),
    "long_pixel95": Measure("four lanes of 2,000 tokens: choice to pixel, 95 of 100 within", "ms", most=150),
    "scrub_fps": Measure("four lanes of 2,000 tokens: frames while the slider is drawn", "1/s"),
    "slow_updates": Measure(f"the same on a phone {SLOWED} times as slow: updates in the browser", "1/s"),
    "slow_pixel95": Measure(f"the same on a phone {SLOWED} times as slow: choice to pixel, 95 of 100 within", "ms"),
    "memory": Measure("memory of the page's script once the browser has compiled it", "MB"),
    "kept": Measure("growth over the first runs", "%", most=5),
    "growth": Measure("growth over as many runs again", "%", most=5),
}


# --- the app and its visitors ---

@contextmanager
def app(*options: str) -> Iterator[tuple[str, float]]:
    """Where `python app.py` answers, and after how many seconds it did."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = time.perf_counter()
    started = subprocess.Popen(
        [sys.executable, "app.py", "--port", str(port), *options],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = f"http://127.0.0.1:{port}/"
        wait_for(address, started)
        yield address, time.perf_counter() - begun
    finally:
        started.terminate()
        started.wait(30)


def wait_for(address: str, started: subprocess.Popen) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            urllib.request.urlopen(address, timeout=10).read()
            return
        except OSError:
            if started.poll() is not None or time.monotonic() > end:
                sys.exit("error: the page did not answer; start it with `python app.py` to see why")
            time.sleep(0.05)


@contextmanager
def visitor(browser: Browser, window: dict[str, int] = WINDOW, noting: bool = True) -> Iterator[Page]:
    """An empty tab of somebody who was never here. What is noted takes memory, so where that is measured nothing is."""
    context = browser.new_context(viewport=window)
    context.set_default_timeout(PATIENCE * 1000)
    if noting:
        context.add_init_script(NOTES)
    yield context.new_page()
    context.close()


def visit(page: Page, address: str, settings: Settings) -> None:
    """Open the page as `settings` has it, and wait until its models are there."""
    page.goto(f"{address}?s={settings.to_code()}")
    page.locator("#run").wait_for()
    page.locator("#live .live[data-state='filled']").wait_for()
    page.wait_for_function(
        "(prompt) => document.querySelector('#prompt textarea').value === prompt", arg=settings.prompt
    )


def run(page: Page) -> None:
    """Press Run and wait until the run is over."""
    before = page.locator("#live .live").get_attribute("data-run")
    page.click("#run")
    page.wait_for_function("(before) => document.querySelector('#live .live').dataset.run !== before", arg=before)
    page.locator("#run").wait_for()


def noted(page: Page, settings: Settings) -> dict[str, list]:
    """What the browser did during a run, with the live view in sight; times in ms."""
    page.locator("#status .dot.ready").wait_for()
    page.locator("#live").scroll_into_view_if_needed()
    page.evaluate("noted.begin()")
    run(page)
    return page.evaluate("({ ...noted, begin: null, scrub: null })")


# --- what is read ---

def of_start(page: Page, address: str) -> Readings:
    begun = time.perf_counter()
    visit(page, address, STORY)
    usable = time.perf_counter() - begun
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return {"paint": [paint / 1000], "usable": [usable]}


def of_stream(notes: dict[str, list]) -> Readings:
    """Updates and frames a second, the share of time that tasks over 50 ms took while lanes wrote, and what came late.
    """
    first, last = notes["frames"][0], notes["frames"][-1]
    seconds = (last - first) / 1000
    blocked = sum(duration for start, duration in notes["tasks"] if first <= start <= last)
    ticks = sum(first <= tick <= last for tick in notes["ticks"])
    return {
        "updates": [len(notes["frames"]) / seconds],
        "fps": [ticks / seconds],
        "blocked": [blocked / seconds / 10],
        "longest": [max((duration for _, duration in notes["tasks"]), default=0.0)],
        "shift": [sum(notes["shifts"])],
        "pixel": [median(notes["latencies"])],
        "pixel95": [quantiles(notes["latencies"], n=20)[-1]],
    }


def of_first_token(page: Page) -> Readings:
    """From the press of the button to the first token that is painted, as the script in the page sees it."""
    page.evaluate("""() => {
        noted.begin();
        noted.pressed = Date.now();
        document.querySelector("#run").click();
    }""")
    page.wait_for_function("noted.shown.length > 0")
    passed = page.evaluate("noted.shown[0] - noted.pressed")
    page.click("#stop")
    page.locator("#run").wait_for()
    return {"first": [passed / 1000]}


def of_slider(page: Page) -> Readings:
    times = page.evaluate(f"noted.scrub({SCRUB})")
    return {"scrub_fps": [(len(times) - 1) / (times[-1] - times[0]) * 1000]}


def of_memory(page: Page, runs: int) -> Readings:
    """After the warm-up, after `runs` more, and after as many again; garbage is collected before each look."""
    looks = [used(page, WARM_UP), used(page, runs), used(page, runs)]
    return {
        "memory": [looks[0] / 1e6],
        "kept": [100 * (looks[1] / looks[0] - 1)],
        "growth": [100 * (looks[2] / looks[1] - 1)],
    }


def used(page: Page, runs: int) -> float:
    """Bytes of script and page objects after so many runs."""
    for _ in range(runs):
        run(page)
    client = page.context.new_cdp_session(page)
    client.send("HeapProfiler.collectGarbage")
    heap = client.send("Runtime.getHeapUsage")
    client.detach()
    return heap["usedSize"] + heap.get("embedderHeapUsedSize", 0)


# --- all of it ---

def measure(browser: Browser, repeats: int, runs: int) -> Readings:
    found: Readings = defaultdict(list)
    for number in range(repeats):
        print(f"round {number + 1} of {repeats}", file=sys.stderr)
        for part in (of_bundled(browser), of_long(browser)):
            for name, values in part.items():
                found[name] += values
    for number in range(TABS):
        print(f"memory, tab {number + 1} of {TABS}", file=sys.stderr)
        with app() as (address, _), visitor(browser, noting=False) as page:
            visit(page, address, SHORT)
            for name, values in of_memory(page, runs).items():
                found[name] += values
    return {**found}


def of_bundled(browser: Browser) -> Readings:
    with app() as (address, answer), visitor(browser) as page:
        start = of_start(page, address)
        stream = of_stream(noted(page, STORY))
        return {"answer": [answer], **start, **stream, **of_first_token(page)}


def of_long(browser: Browser) -> Readings:
    """Random models that take 6,000 positions and never end: the bundled ones end sooner, and what is drawn is the
    same.
    """
    with tempfile.TemporaryDirectory() as folder:
        target, draft = endless(Path(folder))
        with app("--model", target, "--draft", draft) as (address, _), visitor(browser) as page:
            visit(page, address, LONG)
            stream = of_stream(noted(page, LONG))
            quick = {**{f"long_{name}": stream[name] for name in ("fps", "blocked", "pixel95")}, **of_slider(page)}
        with app("--model", target, "--draft", draft) as (address, _), visitor(browser, PHONE) as page:
            page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": SLOWED})
            visit(page, address, LONG)
            stream = of_stream(noted(page, LONG))
            return quick | {f"slow_{name}": stream[name] for name in ("updates", "pixel95")}


def endless(folder: Path) -> tuple[str, str]:
    import saved  # it brings torch along
    saved.CONTEXT = 6000
    models = saved.save_models(folder)
    return models.target, models.draft


# --- what is told ---

@dataclass(frozen=True)
class Report:
    machine: dict[str, Any]
    readings: Readings

    def rows(self) -> list[list[str]]:
        return [
            [
                MEASURES[name].name,
                *_spread(values, MEASURES[name].unit),
                MEASURES[name].aim(),
                MEASURES[name].reached(values),
            ]
            for name, values in sorted(self.readings.items(), key=lambda item: [*MEASURES, item[0]].index(item[0]))
            if name in MEASURES
        ]

    def page(self) -> str:
        facts = [[str(name), str(value)] for name, value in self.machine.items()]
        return (
            f"{INTRODUCTION}\n{_table(['', ''], facts)}\n\n{_table(['', 'median', 'lowest to highest', 'aim', 'reached'], self.rows())}\n"
        )


INTRODUCTION = f"""# The page in a browser

Made by `python tests/measure_page.py --page docs/page-speed.md`; a quiet machine and a few minutes are all it takes.

The app is started as a person starts it, for every round anew, and headless Chromium visits it with a window of 1440 by 900.
Server and browser share the machine, so they compete for its processor, and its clock is that of both.

- **Four lanes** are greedy, sampling, speculation with a draft model, and greedy with a repetition penalty, all on the bundled
  models, 400 tokens each or until the text ends. The server sends at most 20 frames a second.
- **Blocked** is the share of time, from the first frame of a run to the last, in tasks of more than 50 ms on the main thread.
- **Choice to pixel** begins when the oldest event of a frame came out of the session, and ends when the animation frame is
  painted in which the last token of that frame stands in its lane. So every number is that of the token that waited longest.
- **2,000 tokens** are written by random models, for the bundled ones end sooner; what the page draws of them is the same. The
  slider is then drawn to and fro over the whole run, a place for each animation frame. Then the same run is shown in a window of
  390 by 844 by a browser that is made {SLOWED} times as slow: hundreds of tokens a second are too much for it, and it asks for fewer frames.
- **Memory** is the script's and the page's objects after garbage is collected, the median of {TABS} tabs. The browser compiles a script
  while it runs for the first times, and keeps that too: {WARM_UP} runs are its warm-up. The page keeps the last 12 runs of a visit, to
  go back to them; all but the shown and the newest one are compressed and stand outside the script's memory.
"""


def _spread(values: list[float], unit: str) -> list[str]:
    middle, low, high = (f"{value:.3g} {unit}".strip() for value in (median(values), min(values), max(values)))
    return [middle, f"{low} to {high}" if len(values) > 1 else ""]


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def machine(browser: Browser, repeats: int, runs: int) -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    from playground.bench.speed_report import machine as facts  # it brings torch along

    return {
        **facts(torch.device("cpu")),
        "gradio": version("gradio"),
        "chromium": browser.version,
        "rounds": repeats,
        "runs between looks at the memory": runs,
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds, each with an app of its own")
    parser.add_argument("--runs", type=int, default=20, help="runs between two looks at the memory")
    parser.add_argument("--json", type=Path, help="write every reading there")
    parser.add_argument("--page", type=Path, help="write the table there, as Markdown")
    return parser.parse_args()


def main() -> None:
    given = options()
    with chromium() as browser:
        report = Report(machine(browser, given.repeats, given.runs), measure(browser, given.repeats, given.runs))
    print(report.page())
    if given.json:
        given.json.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    if given.page:
        given.page.write_text(report.page(), encoding="utf-8")


if __name__ == "__main__":
    main()
