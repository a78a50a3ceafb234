"""Figures of a finished run, made from its trace: entropy, speed and cost, acceptance."""
from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradio.components.plot import PlotData

from playground.trace import Trace
from playground.trace.lane_metrics import metrics
from playground.trace.plot_style import COLOURS, CONFIG, blank, if_drawn, styled
from playground.trace.transcript import sequences

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def draw(trace: Trace, hues: Sequence[int] = ()) -> list[PlotData | None]:
    """One figure of each kind; None if the run has no data for it.

    `hues`: for each lane the number of its hue, which is its place where none is given.
    """
    return [for_page(make(trace, hues)) for make in KINDS]


def entropy(trace: Trace, hues: Sequence[int] = ()) -> Figure | None:
    """Entropy over positions, with all lanes in one plot."""
    figure = blank("Entropy of the model's distribution before each token", "position in the text", "nats")
    for header in trace.headers:
        steps = sorted(sequences(trace.lane(header.lane).events)[0].steps.items())
        if steps:
            figure.add_scatter(
                x=[at for at, _ in steps],
                y=[round(step.entropy, 4) for _, step in steps],
                mode="lines",
                name=_label(header),
                line={"color": _colour(header, hues), "dash": _dash(header), "width": 1.8},
                hovertemplate="%{y:.2f} nats",
            )
    return if_drawn(figure)


def cost(trace: Trace, hues: Sequence[int] = ()) -> Figure | None:
    """Tokens per second, tokens per target forward, and target forwards."""
    from plotly.subplots import make_subplots
    measured = [(header, metrics(trace.lane(header.lane))) for header in trace.headers]
    figure = make_subplots(
        rows=1, cols=3, horizontal_spacing=0.07, subplot_titles=("tokens/s", "tokens/forward", "forwards")
    )
    for column, name in enumerate(("tokens_per_second", "tokens_per_target_forward", "target_forwards"), 1):
        shown = [(header, values[name]) for header, values in measured if values[name]]
        figure.add_bar(
            x=[f"{header.lane + 1}" for header, _ in shown],
            y=[value for _, value in shown],
            row=1,
            col=column,
            showlegend=False,
            marker_color=[_colour(header, hues) for header, _ in shown],
            texttemplate="%{y:.3~g}",
            textposition="outside",
            hovertext=[_label(header) for header, _ in shown],
        )
    return if_drawn(styled(figure, "Speed and cost", "lane"))


def acceptance(trace: Trace, hues: Sequence[int] = ()) -> Figure | None:
    """Acceptance rate of draft tokens by their position in the draft."""
    figure = blank("Acceptance rate by position in the draft", "position in the draft", "accepted / verified")
    for header in trace.headers:
        rates = metrics(trace.lane(header.lane))["acceptance_by_position"]
        if rates:
            figure.add_scatter(
                x=list(range(1, len(rates) + 1)),
                y=rates,
                mode="lines+markers",
                name=_label(header),
                line={"color": _colour(header, hues), "dash": _dash(header)},
            )
    figure.update_yaxes(range=[0, 1.05])
    figure.update_xaxes(dtick=1)
    return if_drawn(figure)


KINDS = (entropy, cost, acceptance)
DASHES = ("solid", "dash", "dot", "dashdot")  # of the lanes


def for_page(figure: Figure | None) -> PlotData | None:
    """The value for gr.Plot; None for None."""
    return (
        PlotData(type="plotly", plot=json.dumps({**json.loads(figure.to_json()), "config": CONFIG})) if figure else None
    )


def _label(header: Any) -> str:
    return f"{header.lane + 1} · {header.title or header.strategy}"


def _colour(header: Any, hues: Sequence[int]) -> str:
    """A lane beside which others were added, moved or removed keeps its hue, whatever its place."""
    hue = hues[header.lane] if header.lane < len(hues) else header.lane
    return COLOURS[hue % len(COLOURS)]


def _dash(header: Any) -> str:
    """Equal curves lie upon each other: both are seen where the upper one has gaps."""
    return DASHES[header.lane % len(DASHES)]
