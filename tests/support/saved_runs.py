"""Saves what a page shows, and reads what was saved."""
from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from live_page import seek, send
from playwright.sync_api import expect

from playground.events import Candidate, Commit, Done, Header, Stamped, Step
from playground.player.frames import frame, new_name
from playground.trace import Trace
from support.live_runs import RUN


def show(page, feed, trace: Trace = RUN, name: str | None = None) -> str:
    """A whole run, played to its end; returns its name."""
    run = frame(
        name or new_name(),
        0,
        [stamped.to_json() for stamped in trace.events],
        "done",
        [asdict(header) for header in trace.headers],
    )
    send(page, feed, run)
    seek(page, 1.0)
    last = max(stamped.at for stamped in trace.events)
    expect(page.locator(".live .clock")).to_have_text(f"{last:.2f} of {last:.2f} s")
    return run["run"]


def saved(page, tmp_path, *buttons: str) -> Path:
    """The file downloaded by these clicks."""
    for button in buttons[:-1]:
        page.click(button)
    with page.expect_download() as download:
        page.click(buttons[-1])
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    return path


def save_as(page, tmp_path, act: str) -> Path:
    return saved(page, tmp_path, ".live .save > button", f".live .save [data-do={act}]")


def writing(*forced: int, tokens: tuple[int, ...] = (1, 2, 3)) -> tuple[Header, list]:
    """A lane that writes ids as words; its rows have two more candidates at every position."""
    header = Header(
        title="Greedy",
        strategy="greedy",
        model="toy",
        prompt="Say",
        prompt_ids=[5],
        prompt_pieces=["Say"],
        forced=list(forced),
    )
    top = [Candidate(i, f" w{i}", 0.25, 0.25) for i in range(1, 5)]
    events = [
        event
        for i, token in enumerate(tokens)
        for event in (
            Step(i, 1.0, 1.0, token, top),
            Commit(i, [token], [f" w{token}"], f" w{token}", [-1.0], ["sampled"]),
        )
    ]
    return header, [*events, Done("end")]


def visit_run(*lanes: tuple[Header, list]) -> Trace:
    rows = [(number, event) for number, (_, events) in enumerate(lanes) for event in events]
    return Trace([replace(header, lane=number) for number, (header, _) in enumerate(lanes)],
                 [Stamped(number, seq, seq / 100, event) for seq, (number, event) in enumerate(rows)])


FIRST = visit_run(writing())


def kept(page) -> list[str]:
    return page.locator(".live .visit-run").evaluate_all("all => all.map((one) => one.textContent)")
