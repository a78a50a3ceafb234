"""Components drawn by their own script: `gr.HTML` without its overhead for long scripts."""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import gradio as gr

from playground.ui.components.script_files import TYPE, address_of


class Scripted(gr.HTML):
    """Base class of the page's own components.

    gr.HTML treats an unknown attribute as an event if the script contains its name in quotes, and searches the whole
    script for it. Gradio looks up a dozen such names for every update of a component, which takes 30 ms for a script of
    300 kB and delays runs. This class caches the quoted names.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _quoted(self.__dict__.get("js_on_load") or ""):
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name}, and its script has no event of this name."
            )
        return super().__getattr__(name)


class Fetched(Scripted):
    """A component whose script the browser fetches once it is mounted; for components that a run updates.

    With every frame of a run the browser copies all properties of all components ever updated; a script of 300 kB among
    them would be copied 20 times a second. The script is a file (playground.ui.components.script_files), which the
    browser keeps; where the site does not serve it, as in a page that embeds this one, Gradio answers with its text.
    """

    def __init__(self, value: Any, source: str, server_functions: Sequence[Callable[..., Any]] = (), **settings: Any):
        def script(_: Any) -> str:
            return source

        self.script_source = source
        super().__init__(value, js_on_load=_fetching(source), server_functions=[script, *server_functions], **settings)


@cache
def _fetching(source: str) -> str:
    """A script that fetches the real one and runs it, passing its text along.

    The comment with the quoted event names is needed: Gradio finds events by their names in quotes.
    """
    events = json.dumps(sorted(set(re.findall(r'trigger\("(\w+)"', source))))
    return f"""const names = ["element", "trigger", "props", "watch", "server", "SOURCE"]; // events: {events}
const isScript = (answer) => (answer.headers.get("content-type") || "").startsWith("{TYPE}");
const text = (answer) => (isScript(answer) ? answer.text() : server.script());
fetch("{address_of(source)}").then(text, () => server.script())
  .then((source) => Function(...names, source)(element, trigger, props, watch, server, source));"""


@cache
def _quoted(script: str) -> frozenset[str]:
    """All quoted words of a script."""
    return frozenset(re.findall(r"(?<=['\"`])\w+(?=['\"`])", script))
