"""The one public endpoint: the frames of a run, for programs.

A frame travels as JSON text. Gradio sends the difference between one answer and the next, and in 6.31 its clients break
on a list that grows shorter by two or more; a text is replaced as a whole.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from playground.errors import Refusal
from playground.memory import Memory
from playground.ui.lanes import to_json
from playground.ui.settings import Settings
from playground.ui.site import Site


def run_endpoint(site: Site) -> Callable[..., Iterator[str]]:
    """`run` over one site."""

    def run(prompt: str, lanes: list[dict[str, Any]], seed: int = 0, length: int = 64, mode: str = "raw", system: str = "", stop: str = "",
            context: str = "") -> Iterator[str]:
        """Run lanes over a prompt and stream what they do, as frames in JSON: {"run", "n", "events", "state", and first "headers"}.

        Args:
            prompt: text to continue
            lanes: one to four lanes, such as {"strategy": "greedy", "knobs": {}, "extras": [["top_p", {"p": 0.9}]], "seed": 3}
            seed: of the lanes that have none of their own; lanes with one seed share their draws
            length: most tokens a lane may write
            mode: "raw", or "chat" for the model's chat template
            system: system message of a chat
            stop: strings that end a text, one a line
            context: a passage that every lane reads before the prompt
        """
        asked = {"prompt": prompt, "lanes": lanes, "seed": seed, "length": length, "mode": mode, "system": system, "stop": stop, "context": context}
        try:
            yield from map(to_json, frames(site, Settings.read(asked)))
        except Refusal as refusal:
            raise gr.Error(str(refusal)) from None

    return run


def frames(site: Site, settings: Settings) -> Iterator[dict]:
    settings.check(site.rules)
    running = site.start(site.arrival(settings), settings, Memory())
    try:
        yield from (frame for frame in running.frames() if frame)
    finally:
        running.stop()
