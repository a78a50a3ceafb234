"""The live view as one Gradio component: it receives small frames, and everything on it is drawn by the browser.

A frame is a dict that holds only what is new since the last one:

    {"run": "a1b2", "n": 0, "headers": [...], "events": [...], "state": "running", "recorded": False}

`headers` come with the first frame of a run only; `n` counts the frames of a run; `state` is running, held or done;
`told`, where it is there, is when the oldest of its events happened, by the wall clock: the way to the screen is
measured from there. A recorded trace is one frame with everything and `recorded` set. The html, css and scripts are
files under assets/live, which playground.ui.live_view_assets lists.
"""
from __future__ import annotations

import json
from functools import cache
from typing import Any

from playground.ui.live_view_assets import script, styles
from playground.ui.scripted_component import Fetched

STAGE = '<section class="live" aria-label="Live view of the lanes" data-state="empty"></section>'
"""All that Gradio renders. It renders templates anew for every value, so the html and css go in once, by another way.
"""


class Lanes(Fetched):
    """One to four lanes with their player and views. Give it frames as values; bind what a person does with

        lanes.hold(fn)   lanes.resume(fn)   lanes.step(fn)   lanes.stop_lane(fn)   lanes.fork(fn)   lanes.missed(fn)
        lanes.look(fn)   lanes.pace(fn)

    where `fn` may take a gr.EventData: stop_lane carries `lane`; fork carries `lane`, `sequence`, `position` and
    `token`, or `words` that were typed in place of a token; look carries what fork does with a token, and is answered
    by a value {"run", "inside" or "refused"} as playground.decoding.logit_lens tells it, with `lane`, `position`,
    `chosen`; missed carries `run` and asks for the whole run again, in a frame with headers, after frames were lost on
    the way; pace carries `beat`: the seconds that should lie between two frames, so that this browser can follow.
    """

    def __init__(self, value: dict[str, Any] | None = None, **settings: Any):
        super().__init__(
            value,
            _source(),
            html_template=STAGE,
            head=f"<style data-live>{styles()}</style>",
            apply_default_css=False,
            **settings,
        )

    def postprocess(self, value: dict[str, Any] | None) -> str | None:
        """The frame as a JSON text: the page would otherwise track every field of every event it holds."""
        return None if value is None else to_json(value)

    def preprocess(self, payload: str | None) -> dict[str, Any] | None:
        return json.loads(payload) if payload else None

    def api_info(self) -> dict[str, Any]:
        return {"type": "string", "description": "one frame of a run, as JSON"}

    def example_payload(self) -> Any:
        return None

    def example_value(self) -> Any:
        return None


def to_json(frame: dict[str, Any]) -> str:
    """Compact JSON that any browser reads: numbers that JSON does not have become null."""
    try:
        return json.dumps(frame, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(frame), parse_constant=lambda _: None), separators=(",", ":"))


@cache
def _source() -> str:
    """The script; read once, for Gradio builds a component anew for every update of it."""
    return script()
