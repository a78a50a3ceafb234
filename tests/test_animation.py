"""The animation at the head of the README, and the recorded run that it is drawn from."""
from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from draw_animation import REST, SECONDS, drawing

from playground.trace import Trace

ROOT = Path(__file__).parents[1]
RECORDED, DRAWN = ROOT / "assets/traces/first_view.jsonl", ROOT / "docs/decoding.svg"
SVG = "{http://www.w3.org/2000/svg}"


def spans(lane: int) -> list[ElementTree.Element]:
    """The tokens of a lane in the order they are read."""
    lines = [text for text in ElementTree.parse(DRAWN).iter(f"{SVG}text") if text.find(f"{SVG}tspan") is not None]
    left = sorted({int(text.get("x")) for text in lines})[lane]
    return [span for text in lines if int(text.get("x")) == left for span in text.iter(f"{SVG}tspan")]


def recorded(lane: int) -> list[tuple[str, str, float]]:
    """Piece, origin and time of each committed token, from the file's lines themselves."""
    events = [json.loads(line) for line in RECORDED.read_text().splitlines()[1:] if line]
    commits = [event for event in events if event["kind"] == "commit" and event["lane"] == lane]
    return [(piece, origin, event["at"]) for event in commits
            for piece, origin in zip(event["pieces"], event["origins"])]


def test_the_bundled_animation_is_that_of_the_recorded_run():
    assert drawing(Trace.load(RECORDED)) == DRAWN.read_text(encoding="utf-8")


def test_it_is_small_and_fetches_and_executes_nothing():
    text = DRAWN.read_text(encoding="utf-8")
    assert len(text) < 1_000_000 and not re.search(r"<script|href=|url\(|@import| on\w+=", text)


@pytest.mark.parametrize("lane", [0, 1])
def test_every_token_appears_when_it_was_committed_on_one_clock_for_both_lanes(lane):
    slowness = SECONDS / max(json.loads(line)["at"] for line in RECORDED.read_text().splitlines()[1:] if line)
    shown, written = spans(lane), recorded(lane)
    assert written[-1][0] == "<|end|>" and len(shown) == len(written) - 1 > 100
    for span, (piece, origin, at) in zip(shown, written):
        assert span.text.strip() == piece.strip() and (span.get("class") == "d") == (origin == "draft")
        assert float(span.find(f"{SVG}set").get("dur").rstrip("s")) == pytest.approx(at * slowness, abs=0.001)


def test_it_begins_again_after_the_finished_texts_have_rested():
    loop = ElementTree.parse(DRAWN).find(f".//{SVG}animate")
    assert loop.get("begin") == "0s;loop.end" and loop.get("dur") == f"{SECONDS + REST:g}s"
