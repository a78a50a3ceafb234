"""Figures of a survey: score against cost, and acceptance by draft position."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from playground.bench.survey.results import ResultRow
from playground.trace.plot_style import COLOURS, SOFT, blank, if_drawn

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# one per task
SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "star", "triangle-down", "pentagon", "hexagon", "x")
DASHES = ("solid", "dash", "dot", "dashdot")
COSTS: dict[str, tuple[str, Callable[[ResultRow], float | None]]] = {
    "forwards": ("target forwards per token", lambda row: row.target_forwards),
    "flops": ("floating-point operations per token", lambda row: row.flops),
    "time": (
        "milliseconds per token",
        lambda row: 1000 / row.tokens_per_second.median if row.tokens_per_second else None,
    ),
}


def quality(rows: Sequence[ResultRow], cost: str = "forwards") -> Figure | None:
    """Score with its standard error against one of COSTS: a colour per entrant, a marker shape per task.

    None if nothing was scored.
    """
    axis, of = COSTS[cost]
    figure, tasks = blank("Score against cost", axis, "score"), _distinct(rows, lambda row: row.task)
    figure.update_layout(hovermode="closest").update_yaxes(range=[-0.06, 1.08])
    for index, name in enumerate(_distinct(rows, lambda row: row.entrant)):
        shown = [row for row in rows if row.entrant == name and row.score and of(row) is not None]
        figure.add_scatter(
            x=[of(row) for row in shown],
            y=[row.score.mean for row in shown],
            mode="markers",
            name=_plain(name),
            text=[_plain(row.task) for row in shown],
            error_y={"type": "data", "array": [row.score.error or 0 for row in shown], "thickness": 1},
            marker={
                "color": COLOURS[index % len(COLOURS)],
                "size": 10,
                "symbol": [SHAPES[tasks.index(row.task) % len(SHAPES)] + _filling(index) for row in shown],
            },
            hovertemplate="%{text}: score %{y:.2f} at %{x:.3~g}",
        )
    if len(tasks) > 1 and any(trace.x for trace in figure.data):
        _name_shapes(figure, tasks)
    return if_drawn(figure)


def _name_shapes(figure: Figure, tasks: Sequence[str]) -> None:
    """Add the shape of each task to the legend."""
    for index, task in enumerate(tasks):
        marker = {"color": SOFT, "size": 9, "symbol": SHAPES[index % len(SHAPES)]}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=_plain(task), marker=marker, hoverinfo="skip")


def acceptance(rows: Sequence[ResultRow]) -> Figure | None:
    """Acceptance rate by position in the draft, for every entrant and task with draft tokens; None if there are none.
    """
    figure = blank("Draft tokens accepted, by position", "position in the draft", "accepted / tested")
    tasks, names = _distinct(rows, lambda row: row.task), _distinct(rows, lambda row: row.entrant)
    for row in (row for row in rows if row.acceptance_by_position):
        entrant = names.index(row.entrant)
        line = {"color": COLOURS[entrant % len(COLOURS)], "dash": DASHES[tasks.index(row.task) % len(DASHES)]}
        figure.add_scatter(
            x=list(range(1, len(row.acceptance_by_position) + 1)),
            y=row.acceptance_by_position,
            mode="lines+markers",
            name=_plain(f"{row.entrant}, {row.task}"),
            line=line,
            marker={"symbol": "circle" + _filling(entrant)},
        )
    figure.update_yaxes(range=[0, 1.05])
    figure.update_xaxes(dtick=1)
    return if_drawn(figure)


def _filling(entrant: int) -> str:
    """The second four entrants have the colours of the first four, and open markers."""
    return "-open" if entrant // len(COLOURS) % 2 else ""


def _distinct(rows: Sequence[ResultRow], of: Callable[[ResultRow], str]) -> list[str]:
    return list(dict.fromkeys(map(of, rows)))


def _plain(text: str) -> str:
    """Escape a user's text: plotly interprets tags in labels, and a $ as the beginning of a formula."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("$", "&#36;")
