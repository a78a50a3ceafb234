"""The assets of the live view: its styles and its script, for the page and for a run saved as a standalone page.

Gradio provides the script with `element`, `props`, `watch` and `trigger`; standalone.html does the same. The styles are
in assets/live, the modules of the script in assets/scripts.
"""
from __future__ import annotations

from base64 import b64encode
from dataclasses import fields
from typing import Any

from playground import events
from playground.asset_files import ASSETS
from playground.page_scripts import joined
from playground.player.frames import CLOCK, SLOWEST
from playground.player.guarantee_labels import LIMIT, PROMISES
from playground.trace.csv_export import COLUMNS

ENTRY = "player/main.js"
SERIF = ASSETS / "fonts" / "source-serif-4-latin-400.woff2"
STYLES = (
    "live",
    "lanes",
    "composed",
    "thinking",
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

def styles() -> str:
    return "\n".join(_read(f"live/{name}.css") for name in STYLES)


def script() -> str:
    """The script of the view with the constants it shares with Python."""
    return joined(ENTRY, constants())


def surroundings() -> str:
    """The template of a standalone page, with the placeholders {{styles}}, {{trace}} and {{source}}."""
    return _read("live/standalone.html").replace("{{frame}}", _read("palette.css") + _read("live/standalone.css"))


def constants() -> dict[str, Any]:
    """The shared constants by name: defaults of the header and every event, which the wire format omits; frame
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
        "SERIF": serif(),
    }
    return wire | texts


def serif() -> str:
    """The font of everything a model writes, in Base64."""
    return b64encode(SERIF.read_bytes()).decode()


def _defaults(cls: type) -> dict[str, Any]:
    blank = cls()
    return {f.name: getattr(blank, f.name) for f in fields(cls)}


def _read(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
