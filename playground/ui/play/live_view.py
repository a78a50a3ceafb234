"""The live view as one Gradio component. It receives small frames; the browser draws everything.

A frame is a dict with what is new since the previous one:

    {"run": "a1b2", "n": 0, "headers": [...], "events": [...], "state": "running", "recorded": False}

Only the first frame of a run has `headers`. `n` counts the frames of a run; `state` is running, held or done. The
optional `oldest_at` is the wall-clock time of the oldest event, from which the latency to the screen is measured, and
the optional `machine` a reading of playground.ui.server.machine_meters, about once a second. `streamed` in the first
frame of a run says that the run has a stream (playground.ui.server.run_streams), by which the browser then gets its
frames. A recorded trace is one frame with everything and `recorded` set. The html, css and scripts are those of
playground.player.live_view_assets.
"""
from __future__ import annotations

import json
from functools import cache
from typing import Any

from playground.player.frames import to_json
from playground.player.live_view_assets import script, styles
from playground.ui.components.scripted_component import Fetched

STAGE = '<section class="live" aria-label="Live view of the lanes" data-state="empty"></section>'
"""All that Gradio renders. It renders templates again for every value, so the script adds the rest once."""


class Lanes(Fetched):
    """One to four lanes with their player and views. Its values are frames. Bind event handlers with

        lanes.hold(fn)   lanes.resume(fn)   lanes.step(fn)   lanes.stop_lane(fn)   lanes.fork(fn)   lanes.missed(fn)
        lanes.look(fn)   lanes.attribute(fn)   lanes.pace(fn)   lanes.heard(fn)

    where `fn` may take a gr.EventData with these fields:

        stop_lane  lane
        fork       run, lane, and either part, which is off in a copy of the lane, or sequence, position and either
                   token or words (typed text); instead_of: the lane that the copy replaces, if there is no room for
                   one more
        look       run, lane, sequence, position, token; the answer is {"run", "inside" or "refused"}, where "inside" is
                   a result of playground.decoding.logit_lens with lane, position and chosen
        attribute  the same; the answer is {"run", "attributed" or "refused"}, where "attributed" is a result of
                   playground.decoding.attribution with lane, position and piece
        heard      run; a frame of this run has come by its stream
        missed     run; frames were lost, so the answer is the whole run in a frame with headers
        pace       beat: the interval between frames that this browser can handle, in seconds
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
        """The frame as JSON text; otherwise the page would track every field of every event."""
        return None if value is None else to_json(value)

    def preprocess(self, payload: str | None) -> dict[str, Any] | None:
        return json.loads(payload) if payload else None

    def api_info(self) -> dict[str, Any]:
        return {"type": "string", "description": "one frame of a run, as JSON"}

    def example_payload(self) -> Any:
        return None

    def example_value(self) -> Any:
        return None


@cache
def _source() -> str:
    """The script. Cached: Gradio constructs the component again for every update."""
    return script()
