"""A run as a page of its own: one HTML file with the live view and the trace in it, which plays without a server or a
network.

The page writes the same file (assets/live/saving.js). Needs neither gradio nor torch.
"""
from __future__ import annotations

import json
import re
from typing import Any

from playground.trace import Trace
from playground.ui.live_view_assets import script, styles, surroundings

SURROGATE = re.compile("[\ud800-\udfff]")
BLANK = re.compile(r"\{\{(\w+)\}\}")


def to_html(trace: Trace) -> str:
    """The whole file. Prompts and tokens are written by strangers: they stay data, whatever they look like."""
    parts = {"styles": styles(), "trace": _inert(trace.to_json()), "source": _inert(script())}
    return BLANK.sub(lambda blank: parts[blank[1]], surroundings())


def _inert(value: Any) -> str:
    """JSON that cannot end the script element it stands in; lone surrogates, which UTF-8 does not have, are written as
    escapes.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return SURROGATE.sub(lambda lone: f"\\u{ord(lone[0]):04x}", text)
