"""Save a run as a standalone page: one HTML file with the live view and the trace, which needs no server or network.

The page itself writes the same file (assets/scripts/visit/saving.js). Needs neither gradio nor torch.
"""
from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from typing import Any

from playground.player.live_view_assets import script, styles, surroundings
from playground.trace import Trace

SURROGATE = re.compile("[\ud800-\udfff]")
BLANK = re.compile(r"\{\{(\w+)\}\}")


def to_html(trace: Trace) -> str:
    """The whole file. Prompts and tokens are untrusted and are embedded as inert data."""
    parts = {"styles": styles(), "trace": _inert(trace.to_json()), "source": _packed(script())}
    return BLANK.sub(lambda blank: parts[blank[1]], surroundings())


def _packed(text: str) -> str:
    """A text as gzip in Base64, a third of its size, as the page packs it."""
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _inert(value: Any) -> str:
    """JSON that cannot close the script element around it, with lone surrogates, which UTF-8 cannot encode, escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return SURROGATE.sub(lambda lone: f"\\u{ord(lone[0]):04x}", text)
