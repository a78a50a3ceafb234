"""The style of every plotly figure: the page's own colours, axes and margins. Imports plotly lazily.

A figure is made in the colours of the light theme. The page draws it in those of the theme that is on (IN_DARK), so
that a figure, and what is exported of it, looks like the page around it.
"""
from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from playground.asset_files import ASSETS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def _palette(is_dark: bool) -> dict[str, str]:
    """The colours of the page's style sheets, #rrggbb by custom property."""
    sheets = "".join((ASSETS / name).read_text(encoding="utf-8") for name in ("palette.css", "live/live.css"))
    blocks = re.findall(r"^(:root|\.live|\.dark(?: \.live)?) \{([^}]*)\}", sheets, re.MULTILINE)
    return {name: colour for selector, block in blocks if selector.startswith(".dark") == is_dark
            for name, colour in re.findall(r"(--[\w-]+): (#[0-9a-f]{6})\b", block)}


_LIGHT, _DARK = _palette(is_dark=False), _palette(is_dark=True)
_LANES, _GREYS = ([f"--{kind}-{i}" for i in range(count)] for kind, count in (("pg-lane", 4), ("series", 5)))
COLOURS = tuple(_LIGHT[name] for name in _LANES)  # one for each lane, and for nothing else
GREYS = tuple(_LIGHT[name] for name in _GREYS)  # series that are no lanes differ by form, too
INK, SOFT, LINE, GROUND, SHADE = (_LIGHT[f"--{name}"] for name in ("pg-ink", "pg-soft", "pg-line", "pg-card", "bar"))
DASHES = ("solid", "solid", "dash", "dash", "dot")  # of the series, as in the live view
IN_DARK = {_LIGHT[name]: _DARK[name]
           for name in (*_LANES, *_GREYS, "--pg-ink", "--pg-soft", "--pg-line", "--pg-card", "--bar")}
"""What becomes of a figure's colours on a dark page."""
HEIGHT = 330
# below the axis, where it may wrap on a narrow screen
LEGEND = {"orientation": "h", "y": -0.24, "yanchor": "top", "x": 0}
LOOKS: dict[str, Any] = {
    "margin": {"l": 52, "r": 16, "t": 48, "b": 44},
    "paper_bgcolor": GROUND,
    "plot_bgcolor": GROUND,
    "font": {"color": SOFT, "size": 13},
    "hoverlabel": {"bgcolor": GROUND, "bordercolor": LINE, "font": {"color": INK}},
    "modebar": {"bgcolor": GROUND, "color": SOFT, "activecolor": INK},
    "legend": LEGEND,
}
"""What a layout has in any figure. The ground is that of a card, so that an exported picture has one."""
CONFIG = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["lasso2d", "select2d"],
    "toImageButtonOptions": {"format": "svg", "filename": "decoding-playground"},
}


def blank(title: str, x: str, y: str) -> Figure:
    """An empty figure with axes."""
    from plotly.graph_objects import Figure
    return styled(Figure(), title, x).update_yaxes(title_text=y)


def styled(figure: Figure, title: str, x: str) -> Figure:
    """Apply the style to a figure, with a title and the name of its x axis."""
    figure.update_layout(
        **LOOKS,
        height=HEIGHT,
        title={"text": title, "x": 0.004, "y": 0.97, "yanchor": "top", "font": {"size": 14, "color": INK}},
        hovermode="x unified",
        showlegend=True,
    )
    figure.update_xaxes(title_text=x, gridcolor=LINE, zeroline=False)
    figure.update_yaxes(gridcolor=LINE, zeroline=False, rangemode="tozero")
    return figure.update_annotations(font={"size": 13, "color": SOFT})


def series(number: int) -> dict[str, str]:
    """The line of a series that is no lane."""
    return {"color": GREYS[number % len(GREYS)], "dash": DASHES[number % len(DASHES)]}


def if_drawn(figure: Figure) -> Figure | None:
    """The figure, or None if it has no data."""
    return figure if any(len(drawn.x or ()) for drawn in figure.data) else None
