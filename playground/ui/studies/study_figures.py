"""The results of studies of a run, for the page: one drawing for each shape of a Figure event."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from gradio.components.plot import PlotData

from playground.contract import Strategy, discover, make
from playground.errors import Refusal
from playground.events import Event, Figure, Note
from playground.trace import Trace
from playground.trace.plot_style import CONFIG, GREYS, GROUND, HEIGHT, INK, LINE, LOOKS, SHADE, SOFT, series

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as Drawing

ROW = 22  # pixels of a matrix row
SHADES = ((0.0, GROUND), (1.0, SHADE))
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star")  # of the groups of points


def known() -> list[type[Strategy]]:
    """All studies."""
    return [cls for cls in discover().values() if cls.kind == "study"]


def outcomes(trace: Trace) -> dict[str, list[Event]]:
    """The events of each study of a run, by the study's name; studies that do not apply to these lanes are left out."""
    lanes, found = [trace.lane(header.lane) for header in trace.headers], {}
    for study in known():
        with suppress(Refusal):
            found[study.name] = make(study.name).draw(lanes)
    return found


def draw(events: Iterable[Event]) -> list[PlotData]:
    """The figures of a study for gr.Plot, in their order."""
    return [_for_page(drawing) for drawing in drawings(events)]


def notes(events: Iterable[Event]) -> list[str]:
    """The texts of a study's notes."""
    return [event.text for event in events if isinstance(event, Note)]


def drawings(events: Iterable[Event]) -> list[Drawing]:
    """The figures of a study as plotly figures. Figure events with the same name are parts of one figure."""
    parts: dict[str, list[Figure]] = {}
    for event in events:
        if isinstance(event, Figure):
            parts.setdefault(event.name, []).append(event)
    return [_styled(SHAPES[same[0].shape](same), name) for name, same in parts.items()]


def _scalar(parts: list[Figure]) -> Drawing:
    """A line for every series, a dashed line for every threshold."""
    figure = _blank()
    for number, name in enumerate(dict.fromkeys(name for part in parts for name in part.data["series"])):
        points = [
            (part.data["x"], part.data["series"][name]) for part in parts if part.data["series"].get(name) is not None
        ]
        figure.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], name=name, mode="lines+markers",
                           line=series(number) | {"width": 1.8})
    for name, level in {name: level for part in parts for name, level in part.data.get("lines", {}).items()}.items():
        figure.add_hline(y=level, line={"color": SOFT, "dash": "dash", "width": 1}, annotation_text=name)
    figure.update_xaxes(title_text=parts[0].data.get("axis"))
    return figure.update_layout(hovermode="x unified", showlegend=True)


def _bars(parts: list[Figure]) -> Drawing:
    last = parts[-1].data
    return _blank().add_bar(
        x=[str(label) for label in last["labels"]], y=last["values"], marker_color=GREYS[1], texttemplate="%{y:.3~g}"
    )


def _matrix(parts: list[Figure]) -> Drawing:
    """A table of numbers. Rows may have different units, so each is shaded by itself."""
    last = parts[-1].data
    figure = _blank().add_heatmap(
        z=[_shades(row) for row in last["values"]],
        x=[str(c) for c in last["columns"]],
        y=[str(r) for r in last["rows"]],
        text=[[_number(value) for value in row] for row in last["values"]],
        texttemplate="%{text}",
        textfont={"color": INK},
        hoverinfo="x+y+text",
        colorscale=SHADES,
        zmin=0,
        zmax=1,
        showscale=False,
        xgap=1,
        ygap=1,
    )
    figure.update_xaxes(showgrid=False).update_yaxes(showgrid=False, autorange="reversed", automargin=True)
    return figure.update_layout(height=max(HEIGHT, ROW * len(last["rows"]) + 110))


def _tree(parts: list[Figure]) -> Drawing:
    """Nodes by depth, each joined to its parent; parents come before their children."""
    last, places = parts[-1].data, []
    for row, parent in enumerate(last["parents"]):
        places.append((0 if parent < 0 else places[parent][0] + 1, row))
    figure = _blank()
    for (x, y), parent in zip(places, last["parents"]):
        if parent >= 0:
            figure.add_scatter(
                x=[places[parent][0], x],
                y=[places[parent][1], y],
                mode="lines",
                line={"color": LINE},
                hoverinfo="skip",
                showlegend=False,
            )
    figure.add_scatter(
        x=[x for x, _ in places],
        y=[y for _, y in places],
        mode="markers+text",
        text=[str(label) for label in last["labels"]],
        textposition="middle right",
        customdata=last["values"],
        hovertemplate="%{text}: %{customdata:.3~g}<extra></extra>",
        marker={"color": GREYS[0]},
        showlegend=False,
    )
    figure.update_yaxes(autorange="reversed", visible=False)
    return figure


def _spans(parts: list[Figure]) -> Drawing:
    """A bar over the positions of each span, in a row for every label."""
    spans = [span for part in parts for span in part.data["spans"]]
    return _blank().add_bar(
        x=[end - start for start, end, _, _ in spans],
        base=[start for start, *_ in spans],
        y=[str(label) for _, _, label, _ in spans],
        text=[_number(value) for *_, value in spans],
        orientation="h",
        marker_color=GREYS[1],
    )


def _points(parts: list[Figure]) -> Drawing:
    """A grey and a form for every group, a cross for each point that is crossed out, and arrows from the origin."""
    points, figure = [point for part in parts for point in part.data.get("points", ())], _blank()
    for number, group in enumerate(dict.fromkeys(group for _, _, _, group, _ in points)):
        own = [point for point in points if point[3] == group]
        symbol = SYMBOLS[number % len(SYMBOLS)] if group else "circle"
        figure.add_scatter(
            x=[x for x, *_ in own],
            y=[y for _, y, *_ in own],
            mode="markers",
            name=group or "others",
            text=[point[2] for point in own],
            hovertemplate="%{text}",
            marker={
                "color": GREYS[number % len(GREYS)] if group else SOFT,
                "symbol": ["x" if point[4] else symbol for point in own],
            },
        )
    for x, y, label in (arrow for part in parts for arrow in part.data.get("path", ())):
        figure.add_annotation(x=x, y=y, ax=0, ay=0, axref="x", ayref="y", text=label, arrowhead=2, arrowcolor=SOFT)
    return figure.update_layout(showlegend=True)


SHAPES: dict[str, Callable[[list[Figure]], Drawing]] = {
    "scalar": _scalar, "bars": _bars, "matrix": _matrix, "tree": _tree, "spans": _spans, "points": _points}


def _shades(row: list[float | None]) -> list[float | None]:
    """The absolute values of a row, relative to its largest."""
    largest = max((abs(value) for value in row if value is not None), default=0) or 1
    return [None if value is None else abs(value) / largest for value in row]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _blank() -> Drawing:
    from plotly.graph_objects import Figure as Drawing  # imported late: it takes a second
    return Drawing(layout={"height": HEIGHT})


def _styled(figure: Drawing, name: str) -> Drawing:
    figure.update_layout(**LOOKS, title={"text": name, "x": 0.004, "font": {"size": 14, "color": INK}})
    return figure.update_xaxes(gridcolor=LINE, zeroline=False).update_yaxes(gridcolor=LINE, zeroline=False)


def _for_page(figure: Drawing) -> PlotData:
    return PlotData(type="plotly", plot=json.dumps({**json.loads(figure.to_json()), "config": CONFIG}))
