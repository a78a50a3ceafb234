"""Components drawn by a script of ours: `gr.HTML`, without what it costs to be one with a long script."""
from __future__ import annotations

import re
from functools import cache
from typing import Any

import gradio as gr


class Scripted(gr.HTML):
    """What a page's own components are made of.

    gr.HTML takes a name it does not have for an event where the script says it in quotes, and reads the whole script to see. Gradio
    asks for a dozen such names whenever it tells the browser of a component: 30 ms for a script of 300 kB, and a run waits.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _quoted(self.__dict__.get("js_on_load") or ""):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}, and its script no event of this name.")
        return super().__getattr__(name)


@cache
def _quoted(script: str) -> frozenset[str]:
    """All words that stand in quotes in a script."""
    return frozenset(re.findall(r"(?<=['\"`])\w+(?=['\"`])", script))
