"""Figures of results, drawn with plotly or with matplotlib from the same numbers."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

from playground.errors import Refusal
from playground.request_limits import quoted
from playground.trace.plot_style import COLOURS, blank
from playground.trace.result import Result
from playground.trace.transcript import sequences


class LaneLine(NamedTuple):
    """One lane's line."""

    name: str
    x: list[int]
    y: list[float]


class FigureKind(NamedTuple):
    """What a figure shows of a result, and the names of its axes."""

    title: str
    x: str
    y: str
    of: Callable[[Result], tuple[list[int], list[float]]]


def _entropy(result: Result) -> tuple[list[int], list[float]]:
    steps = sorted(sequences(result.trace.events)[0].steps.items())
    return [position for position, _ in steps], [step.entropy for _, step in steps]


def _acceptance(result: Result) -> tuple[list[int], list[float]]:
    rates = result.metrics["acceptance_by_position"] or []
    return list(range(1, len(rates) + 1)), list(rates)


KINDS = {
    "entropy": FigureKind(
        "Entropy of the model's distribution before each token", "position in the text", "entropy (nats)", _entropy
    ),
    "acceptance": FigureKind(
        "Acceptance rate by position in the draft", "position in the draft", "accepted / verified", _acceptance
    ),
}


def figure(kind: str, results: Result | Iterable[Result], library: str = "plotly") -> Any:
    """A figure of one result or several: "entropy" over the text, or "acceptance" of draft tokens by their depth.

    library: "plotly", or "matplotlib" where that is installed. Returns its Figure, which a notebook shows and which has
    methods of its own for files. Raises Refusal, also if no result has such numbers.
    """
    shown, draw = _chosen(kind, KINDS, "kind of figure"), _chosen(library, LIBRARIES, "library for figures")
    given = [results] if isinstance(results, Result) else list(results)
    lines = [LaneLine(_label(result, number, given), *shown.of(result)) for number, result in enumerate(given, 1)]
    if not any(line.x for line in lines):
        raise Refusal(f"None of the results has numbers for {kind}: give results of runs that do.", "results")
    return draw(shown, [line for line in lines if line.x])


def _chosen(name: str, offered: dict[str, Any], what: str) -> Any:
    if name not in offered:
        near = get_close_matches(str(name), offered, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(offered)}."
        raise Refusal(f"There is no {what} {quoted(name)}; {hint}", "kind")
    return offered[name]


def _label(result: Result, number: int, results: list[Result]) -> str:
    """The lane's title; with its place where several have the same."""
    title = result.header.title or result.strategy
    return title if len({(each.header.title or each.strategy) for each in results}) == len(results) else (
        f"{number} · {title}")


def _plotly(kind: FigureKind, lines: list[LaneLine]) -> Any:
    drawn = blank(kind.title, kind.x, kind.y)
    for line, colour in zip(lines, _colours(lines)):
        drawn.add_scatter(x=line.x, y=line.y, name=line.name, mode="lines+markers", line={"color": colour})
    return drawn


def _matplotlib(kind: FigureKind, lines: list[LaneLine]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Refusal("This figure needs matplotlib: install it with `pip install matplotlib`.", "library") from None
    drawn = Figure(layout="constrained")  # without pyplot, which would keep every figure
    axes = drawn.subplots()
    for line, colour in zip(lines, _colours(lines)):
        axes.plot(line.x, line.y, color=colour, label=line.name, marker=".")
    axes.set(title=kind.title, xlabel=kind.x, ylabel=kind.y, ylim=(0, None))
    axes.legend(frameon=False)
    return drawn


def _colours(lines: list[LaneLine]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(lines))]


LIBRARIES: dict[str, Callable[[FigureKind, list[LaneLine]], Any]] = {"plotly": _plotly, "matplotlib": _matplotlib}
