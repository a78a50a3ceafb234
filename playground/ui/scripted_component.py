"""Components drawn by a script of ours: `gr.HTML`, without what it costs to be one with a long script."""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import gradio as gr


class Scripted(gr.HTML):
    """What a page's own components are made of.

    gr.HTML takes a name it does not have for an event where the script says it in quotes, and reads the whole script to
    see. Gradio asks for a dozen such names whenever it tells the browser of a component: 30 ms for a script of 300 kB,
    and a run waits.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _quoted(self.__dict__.get("js_on_load") or ""):
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name}, and its script no event of this name."
            )
        return super().__getattr__(name)


class Fetched(Scripted):
    """One whose script the browser asks for when the component is there, as those that a run tells of are.

    With every frame of a run the browser copies all properties of all components that an event ever told of; a script
    of 300 kB among them would be copied 20 times a second.
    """

    def __init__(self, value: Any, source: str, server_functions: Sequence[Callable[..., Any]] = (), **settings: Any):
        def script(_: Any) -> str:
            return source

        super().__init__(value, js_on_load=_fetching(source), server_functions=[script, *server_functions], **settings)


@cache
def _fetching(source: str) -> str:
    """Fetch the script and run it with its own text at hand. Gradio takes for events what it finds named in quotes."""
    acts = json.dumps(sorted(set(re.findall(r'trigger\("(\w+)"', source))))
    return f"""const names = ["element", "trigger", "props", "watch", "server", "SOURCE"]; // it tells of {acts}
server.script().then((source) => Function(...names, source)(element, trigger, props, watch, server, source));"""


@cache
def _quoted(script: str) -> frozenset[str]:
    """All words that stand in quotes in a script."""
    return frozenset(re.findall(r"(?<=['\"`])\w+(?=['\"`])", script))
