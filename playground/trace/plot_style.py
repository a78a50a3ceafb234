"""The style of every plotly figure: colours, axes and margins, for light and dark pages. Imports plotly lazily."""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # distinguishable with any kind of colour vision
GREY = "#7d8590"
LINE = "rgba(125, 133, 144, 0.22)"
HEIGHT = 330
# below the axis, where it may wrap on a narrow screen
LEGEND = {"orientation": "h", "y": -0.24, "yanchor": "top", "x": 0}
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
    """Apply the style: no background and grey text, legible on light and dark pages."""
    figure.update_layout(
        height=HEIGHT,
        margin={"l": 52, "r": 16, "t": 48, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        title={"text": title, "x": 0.004, "y": 0.97, "yanchor": "top", "font": {"size": 14}},
        font={"color": GREY, "size": 13},
        legend=LEGEND,
        hovermode="x unified",
        showlegend=True,
    )
    figure.update_xaxes(title_text=x, gridcolor=LINE, zeroline=False)
    figure.update_yaxes(gridcolor=LINE, zeroline=False, rangemode="tozero")
    return figure.update_annotations(font={"size": 13, "color": GREY})


def if_drawn(figure: Figure) -> Figure | None:
    """The figure, or None if it has no data."""
    return figure if any(len(series.x or ()) for series in figure.data) else None
