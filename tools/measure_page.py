"""Measures the page in a browser: `python tools/measure_page.py [--repeats 5] [--runs 20] [--json FILE] [--page
docs/page-speed.md]`.

A headless Chromium visits the app. A script injected before the page's own (measure_page.js) records frames, paints and
long tasks. Server and browser share one machine and its clock.
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

from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the file is run as a script

from chromium import chromium, new_context  # noqa: E402

from playground.ui.components.settings import Settings  # noqa: E402

NOTES = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
TIMEOUT = 300  # seconds after which something is broken rather than slow
WINDOW = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
SLOWED = 6  # CPU slow-down that stands for an older phone
POLLED = 200  # ms between two looks whether a run is over: a look takes time of the page
OVER = """(before) => {
    const button = document.getElementById("run");
    return document.querySelector("#live .live").dataset.run !== before && button?.checkVisibility();
}"""
SCRUB = 4  # seconds of moving the slider back and forth
WARM_UP = 5  # runs before the first memory measurement
TABS = 3  # for the memory measurement
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
    """A measured quantity and its aim, an upper or a lower bound."""

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
    "answer": Measure("`python app.py` to the first response", "s", most=10),
    "paint": Measure("address entered to first contentful paint", "s", most=2),
    "usable": Measure("address entered to a page with all its parts", "s"),
    "first": Measure("Run pressed to the first token on the screen", "s", most=0.5),
    "updates": Measure("four lanes: updates in the browser", "1/s", least=10),
    "blocked": Measure("four lanes: main thread blocked while lanes run", "%", most=5),
    "longest": Measure("four lanes: longest task, the end of the run included", "ms"),
    "pixel": Measure("four lanes: choice to pixel, median", "ms"),
    "pixel95": Measure("four lanes: choice to pixel, 95th percentile", "ms", most=150),
    "shift": Measure("four lanes: layout shift of a run", "", most=0.1),
    "long_fps": Measure("four lanes of 2,000 tokens: frames while they run", "1/s"),
    "long_blocked": Measure("four lanes of 2,000 tokens: main thread blocked", "%", most=5),
    "long_pixel95": Measure("four lanes of 2,000 tokens: choice to pixel, 95th percentile", "ms", most=150),
    "scrub_fps": Measure("four lanes of 2,000 tokens: frames while the slider moves", "1/s"),
    "slow_updates": Measure(f"the same on a phone {SLOWED} times as slow: updates in the browser", "1/s"),
    "slow_pixel95": Measure(f"the same on a phone {SLOWED} times as slow: choice to pixel, 95th percentile", "ms"),
    "memory": Measure("script memory after the warm-up", "MB"),
    "kept": Measure("growth over the first runs", "%", most=5),
    "growth": Measure("growth over the next as many runs", "%", most=5),
}


# --- app and visitors ---

@contextmanager
def app(*options: str) -> Iterator[tuple[str, float]]:
    """The address of `python app.py`, and the seconds until it answered."""
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
    end = time.monotonic() + TIMEOUT
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
    """A new tab without stored state. Recording takes memory, so it is switched off for the memory measurement."""
    context = new_context(browser, viewport=window)
    context.set_default_timeout(TIMEOUT * 1000)
    if noting:
        context.add_init_script(NOTES)
    yield context.new_page()
    context.close()


def visit(page: Page, address: str, settings: Settings) -> None:
    """Open the page with `settings`, and wait until its models are loaded."""
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
    page.wait_for_function(OVER, arg=before, polling=POLLED)


def noted(page: Page, settings: Settings) -> dict[str, list]:
    """What was recorded during a run, with the live view in sight; times in ms."""
    page.locator("#status .dot.ready").wait_for()
    page.locator("#live").scroll_into_view_if_needed()
    page.evaluate("noted.begin()")
    run(page)
    return page.evaluate("({ ...noted, begin: null, scrub: null })")


# --- readings ---

def of_start(page: Page, address: str) -> Readings:
    begun = time.perf_counter()
    visit(page, address, STORY)
    usable = time.perf_counter() - begun
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return {"paint": [paint / 1000], "usable": [usable]}


def of_stream(notes: dict[str, list]) -> Readings:
    """Updates and frames per second, the share of time in tasks over 50 ms, and latencies."""
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
    """Seconds from the click on Run to the first painted token."""
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
    """Memory after the warm-up, after `runs` more, and after `runs` more again, each after garbage collection."""
    sizes = [used(page, WARM_UP), used(page, runs), used(page, runs)]
    return {
        "memory": [sizes[0] / 1e6],
        "kept": [100 * (sizes[1] / sizes[0] - 1)],
        "growth": [100 * (sizes[2] / sizes[1] - 1)],
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


# --- the measurement ---

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
    """Four lanes of random models with 6,000 positions that never end; the bundled ones end sooner."""
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
    import saved  # imports torch
    saved.CONTEXT = 6000
    models = saved.save_models(folder)
    return models.target, models.draft


# --- report ---

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
        rows = _table(["", "median", "lowest to highest", "aim", "reached"], self.rows())
        return f"{INTRODUCTION}\n{_table(['', ''], facts)}\n\n{rows}\n"


INTRODUCTION = f"""# The page in a browser

Made by `python tools/measure_page.py --page docs/page-speed.md` on an idle machine, in about ten minutes.

Every round starts the app with its defaults, and headless Chromium visits it with a window of 1440 by 900. Server and
browser share the machine and its clock, so they compete for its processor.

- **Four lanes** are greedy, sampling, speculation with a draft model, and greedy with a repetition penalty, on the
  bundled models, 400 tokens each or until the text ends. The server sends at most 30 frames per second.
- **Blocked** is the share of time, from the first frame of a run to the last, in tasks of more than 50 ms on the main
  thread.
- **Choice to pixel** is the time from the oldest event of a frame leaving the session to the paint that shows the
  last token of that frame in its lane, so it is the latency of the token that waited longest.
- **2,000 tokens** are generated by random models, because the bundled ones end sooner; the page draws them in the
  same way. The slider is then moved back and forth over the whole run, one position per animation frame. The same run
  is shown again in a window of 390 by 844 with a processor slowed down {SLOWED} times. Hundreds of tokens per second
  are too many for it, so the page requests fewer frames.
- **Memory** is the size of the script's and the page's objects after garbage collection, the median of {TABS} tabs.
  The browser compiles scripts during the first runs and retains the result; {WARM_UP} runs are the warm-up. The page
  keeps the last 12 runs of a visit; all except the shown and the newest one are compressed, outside the script's
  heap.
"""


def _spread(values: list[float], unit: str) -> list[str]:
    middle, low, high = (f"{value:.3g} {unit}".strip() for value in (median(values), min(values), max(values)))
    return [middle, f"{low} to {high}" if len(values) > 1 else ""]


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def machine(browser: Browser, repeats: int, runs: int) -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    from playground.bench.speed.speed_report import machine as facts  # imports torch

    return {
        **facts(torch.device("cpu")),
        "gradio": version("gradio"),
        "chromium": browser.version,
        "rounds": repeats,
        "runs between memory measurements": runs,
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds, each with a new app process")
    parser.add_argument("--runs", type=int, default=20, help="runs between two memory measurements")
    parser.add_argument("--json", type=Path, help="write all readings to FILE")
    parser.add_argument("--page", type=Path, help="write the report to FILE, as Markdown")
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
