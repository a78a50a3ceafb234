"""The assets of the live view: its styles and its script, for the page and for a run saved as a standalone page.

Gradio provides the script with `element`, `props`, `watch` and `trigger`; standalone.html does the same. The files are
in assets/live.
"""
from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import fields
from typing import Any

from playground import events
from playground.asset_files import ASSETS
from playground.player.frames import CLOCK, SLOWEST
from playground.player.guarantee_labels import LIMIT, PROMISES
from playground.trace.csv_export import COLUMNS

SERIF = ASSETS / "fonts" / "source-serif-4-latin-400.woff2"
STYLES = (
    "live",
    "lanes",
    "composed",
    "stage",
    "views",
    "views/choice",
    "views/entropy",
    "views/tree",
    "views/rounds",
    "views/cache",
    "views/branches",
    "views/canvas",
    "views/mask",
    "views/figures",
    "cost",
    "difference",
    "inside",
    "attribution",
    "card",
    "stages",
    "saving",
    "view_menu",
    "visit",
    "keys",
    "replacing",
    "sizes",
    "inspector",
    "phone",
)
SCRIPTS = (
    "serif",
    "dom",
    "composed",
    "contents",
    "trace",
    "metrics",
    "ledger",
    "model",
    "readings",
    "player",
    "colour",
    "text",
    "words",
    "stages",
    "card",
    "plain",
    "headlines",
    "lane_names",
    "lane",
    "views/panel",
    "views/speakers",
    "views/choice",
    "views/entropy",
    "views/branches",
    "views/difference",
    "views/canvas",
    "views/tree",
    "views/rounds",
    "views/cache_bars",
    "views/cache",
    "views/mask",
    "views/cost",
    "views/figures",
    "views/inside",
    "views/attribution",
    "keys",
    "spreadsheet",
    "vector",
    "picture",
    "page_text",
    "saving",
    "view_menu",
    "visit",
    "keeping",
    "position",
    "views/history",
    "places",
    "course",
    "bar",
    "lag",
    "streams",
    "replacing",
    "listening",
    "inspector",
    "seats",
    "stage",
    "main",
)
"""In this order: they share one scope, and `main` starts them."""


def styles() -> str:
    return "\n".join(_read(f"live/{name}.css") for name in STYLES)


def script() -> str:
    """All scripts as the body of one function, preceded by the constants they share with Python."""
    return "\n".join(['"use strict";', *constants(), *(_read(f"live/{name}.js") for name in SCRIPTS)])


def surroundings() -> str:
    """The template of a standalone page, with the placeholders {{styles}}, {{trace}} and {{source}}."""
    return _read("live/standalone.html").replace("{{frame}}", _read("palette.css") + _read("live/standalone.css"))


def constants() -> list[str]:
    """Definitions of the shared constants: defaults of the header and every event, which the wire format omits; frame
    intervals; labels of guarantees, null for those without a badge; the page skeleton; the formats of saved runs; and
    the font.
    """
    wire = {
        "VERSION": events.VERSION,
        "EVENTS": {kind: _defaults(cls) for kind, cls in events.EVENTS.items()},
        "HEADER": _defaults(events.Header),
    }
    wire |= {"CLOCK": CLOCK, "SLOWEST": SLOWEST}
    texts = {
        "PROMISES": PROMISES | dict.fromkeys(LIMIT),
        "SKELETON": _read("live/live.html"),
        "COLUMNS": COLUMNS,
        "STANDALONE": surroundings(),
        "SERIF": b64encode(SERIF.read_bytes()).decode(),
    }
    return [f"const {name} = {json.dumps(value)};" for name, value in (wire | texts).items()]


def _defaults(cls: type) -> dict[str, Any]:
    blank = cls()
    return {f.name: getattr(blank, f.name) for f in fields(cls)}


def _read(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
