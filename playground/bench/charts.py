"""Small SVG charts: lines or bars over categories, each value with its standard error. Missing values are not drawn.

They are drawn by hand because plotly, which draws the figures of the page, can only export static images with kaleido
and a headless browser, too large a dependency for the charts of a report. The white background is part of the image, so
that a chart looks the same on a dark page.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

WIDTH, LEFT, RIGHT, TOP, PLOT, LETTER = 640, 46, 14, 30, 190, 6.3  # pixels; LETTER is a mean character width
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # distinguishable with any kind of colour vision
MORE = ("#56b4e9", "#e69f00", "#000000", "#999999")
Value = tuple[float, float] | None  # value and standard error, 0 if there is none; None if nothing was measured


@dataclass(frozen=True)
class Chart:
    """series: {name: a value for each of `places`, the categories}. levels: {name: value}, drawn as dashed lines.

    at: {series: x positions of its values, in places}, for lines whose values are between the places.
    """

    title: str
    x: str
    y: str
    places: list[str]
    series: dict[str, list[Value]]
    levels: dict[str, float] = field(default_factory=dict)
    bars: bool = False
    at: dict[str, list[float]] = field(default_factory=dict)

    def svg(self) -> str:
        """The whole chart; raises ValueError if there is nothing to draw."""
        drawn = [*self._grid(), *self._levels(), *(self._bars() if self.bars else self._lines()), *self._keys()]
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
                'font-family="sans-serif" font-size="12" role="img">',
                f"<title>{escape(self.title)}</title>",
                f'<rect width="{WIDTH}" height="{self.height}" fill="white"/>',
                _text(LEFT, 17, self.title, "start", "#222", 'font-weight="bold"'),
                *drawn,
                "</svg>",
                "",
            ]
        )

    @property
    def height(self) -> int:
        return TOP + PLOT + 46 + 18 * (1 + max(row for _, row, _ in self._legend()))

    def _legend(self) -> list[tuple[float, int, str]]:
        return [*_legend([*self.series, *self.levels])]

    @property
    def _top(self) -> float:
        """A round number at or above every value plus error."""
        highest = max(
            [
                *self.levels.values(),
                *(value + error for values in self.series.values() for value, error in filter(None, values)),
            ]
        )
        step = _step(highest)
        return max(step, math.ceil(highest / step - 1e-9) * step)

    def _at(self, place: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / len(self.places)

    def _level(self, value: float) -> float:
        return TOP + PLOT * (1 - value / self._top)

    def _grid(self) -> Iterator[str]:
        step = _step(self._top)
        for k in range(round(self._top / step) + 1):
            level = self._level(k * step)
            yield f'<path d="M{LEFT} {level:.1f}H{WIDTH - RIGHT}" stroke="{"#999" if k == 0 else "#ddd"}"/>'
            yield _text(LEFT - 6, level + 4, f"{k * step:g}", "end")
        for place, name in enumerate(self.places):
            yield _text(self._at(place), TOP + PLOT + 16, name, "middle")
        yield _text(WIDTH - RIGHT, TOP + PLOT + 32, self.x, "end")
        yield _text(WIDTH - RIGHT, 17, self.y, "end")

    def _levels(self) -> Iterator[str]:
        for colour, value in zip(_colours()[len(self.series):], self.levels.values()):
            line = f"M{LEFT} {self._level(value):.1f}H{WIDTH - RIGHT}"
            yield f'<path d="{line}" stroke="{colour}" stroke-dasharray="5 4"/>'

    def _lines(self) -> Iterator[str]:
        for number, (colour, (name, values)) in enumerate(zip(_colours(), self.series.items())):
            points = [
                (self._at(place), *value)
                for place, value in zip(self.at.get(name, range(len(values))), values)
                if value
            ]
            path = " ".join(f"{x:.1f},{self._level(value):.1f}" for x, value, _ in points)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{_dotted(number)}/>'
            for x, value, error in points:
                yield f'<circle cx="{x:.1f}" cy="{self._level(value):.1f}" r="3" fill="{colour}"/>'
                yield self._error(x, value, error, colour)

    def _bars(self) -> Iterator[str]:
        wide = 0.8 / len(self.series)
        for number, (colour, values) in enumerate(zip(_colours(), self.series.values())):
            for place, (value, error) in ((place, value) for place, value in enumerate(values) if value):
                middle = self._at(place + (number - (len(self.series) - 1) / 2) * wide)
                half = (self._at(wide) - self._at(0)) * 0.45
                corner = f'x="{middle - half:.1f}" y="{self._level(value):.1f}"'
                size = f'width="{2 * half:.1f}" height="{PLOT * value / self._top:.1f}"'
                yield f'<rect {corner} {size} fill="{colour}"/>'
                yield self._error(middle, value, error, "#333")

    def _error(self, x: float, value: float, error: float, colour: str) -> str:
        """One standard error up and down, clipped at the axis."""
        low, high = self._level(max(0.0, value - error)), self._level(value + error)
        return f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>' if error else ""

    def _keys(self) -> Iterator[str]:
        for place, ((x, row, name), colour) in enumerate(zip(self._legend(), _colours())):
            y = TOP + PLOT + 50 + 18 * row
            dashed = ' stroke-dasharray="5 4"' if place >= len(self.series) else _dotted(place)
            yield f'<path d="M{x:.1f} {y - 4}h16" stroke="{colour}" stroke-width="{1.5 if dashed else 4}"{dashed}/>'
            yield _text(x + 22, y, name, "start")


def _legend(names: list[str]) -> Iterator[tuple[float, int, str]]:
    """Left edge and row of each name; each row takes as many as fit."""
    x, row = float(LEFT), 0
    for name in names:
        wide = 38 + LETTER * len(name)
        if x > LEFT and x + wide > WIDTH - RIGHT:
            x, row = float(LEFT), row + 1
        yield x, row, name
        x += wide


def _step(highest: float) -> float:
    """Distance between grid lines: 1, 2 or 5 times a power of ten, giving four to nine of them."""
    if not highest:
        return 1.0
    power = 10 ** math.floor(math.log10(highest))
    return next(power * share for share in (0.1, 0.2, 0.5, 1) if highest / (power * share) <= 9 or share == 1)


def _colours() -> list[str]:
    return [*COLOURS, *MORE] * 4


def _dotted(number: int) -> str:
    """Lines that reuse a colour are dotted."""
    return ' stroke-dasharray="2 3"' if number >= len([*COLOURS, *MORE]) else ""


def below(charts: list[Chart]) -> str:
    """Charts stacked vertically in one SVG; raises ValueError if there is nothing to draw."""
    placed, height = [], 0
    for chart in charts:
        placed.append(chart.svg().replace("<svg ", f'<svg y="{height}" height="{chart.height}" ', 1))
        height += chart.height
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">', *placed, "</svg>", ""]
    )


def _text(x: float, y: float, words: str, anchor: str, colour: str = "#555", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" {more}>{escape(words)}</text>'
