"""One lane under several values of one or two knobs: a panel with a grid whose cells can be opened as lanes."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape
from typing import Any

import gradio as gr

from playground.decoding.lane_checks import check_ready
from playground.errors import Refusal
from playground.player.frames import Facts, trace_of
from playground.run_request import LANES
from playground.trace.knob_grid import Cell, cells
from playground.ui.components.event_fields import whole_number
from playground.ui.components.scripted_component import Scripted
from playground.ui.components.settings import Settings
from playground.ui.components.theme import PRIVATE
from playground.ui.play.visit import Visit
from playground.ui.server.site import Site
from playground.ui.sweeps.knob_sweep import MOST_VALUES, KnobSweep, axis, knobs_of, swept
from playground.ui.sweeps.sweep_panel import SweepPanel

NONE = ""  # no second knob
WRITTEN = ("branches", "commit", "rollback", "step", "done", "failed")  # kinds of events that a cell is made from
BEGINNING = 120  # characters of a text in its cell
ENDS = {
    "end": "end token",
    "length": "length limit",
    "stop_string": "stop string",
    "grammar": "grammar complete",
    "stopped": "stopped",
    "failed": "failed",
}
# The numbers that can colour the cells, by name: the label of the choice, and how a value is written
NUMBERS: dict[str, tuple[str, Callable[[float], str]]] = {
    "same": ("share equal to the first cell", "{:.0%}".format),
    "entropy": ("mean entropy", "{:.2f} nats".format),
    "speed": ("tokens/s", "{:.1f} tokens/s".format),
}
SCRIPT = """
element.addEventListener("click", (event) => {
  const cell = event.target.closest("[data-cell]");
  if (cell) trigger("open_cell", { cell: Number(cell.dataset.cell) });
});
"""


class KnobGrid(Scripted):
    """The drawn grid. The event is 'open_cell', with the number of a `cell`, row by row."""

    def __init__(self, **settings: Any):
        super().__init__("", js_on_load=SCRIPT, apply_default_css=False, **settings)


class KnobSweepPanel(SweepPanel):
    """The panel with its event handlers."""

    def __init__(self, site: Site):
        super().__init__(site)
        title = "One lane, a grid of knobs"
        with gr.Accordion(title, open=False, elem_classes="figures repeats", elem_id="sweep") as self.fold:
            with gr.Row(elem_classes="ask"):
                lanes = [(f"Lane {lane + 1}", lane) for lane in range(LANES)]
                self.lane = gr.Dropdown(lanes, value=0, label="Lane", min_width=100, scale=1, elem_id="sweep-lane")
                self.row_knob, self.row_values = self._axis("row", "Rows")
                self.column_knob, self.column_values = self._axis("column", "Columns")
                self.go = gr.Button("Run grid", variant="secondary", min_width=110, scale=0, elem_id="run-sweep")
                self.halt = gr.Button(
                    "Stop", variant="stop", min_width=110, scale=0, visible=False, elem_id="stop-sweep"
                )
            gr.HTML(
                f"<p>Values are a list, <code>0.2, 0.7</code>, or a range, <code>0.2..1.2 by 0.5</code>: at most "
                f"{MOST_VALUES} for each knob, and {min(site.rules.repeats, MOST_VALUES ** 2)} cells. All cells share "
                "one seed and run together, so their tokens/s compare with each other, not with a lane alone.</p>",
                elem_classes="fold-note",
                apply_default_css=False,
            )
            self.colour = gr.Radio(
                [(label, name) for name, (label, _) in NUMBERS.items()],
                value="same",
                label="Colour the cells by",
                elem_id="sweep-colour",
            )
            self.output = KnobGrid(elem_classes="fold-note", elem_id="swept")

    def inputs(self) -> list[gr.components.Component]:
        return [self.lane, self.row_knob, self.row_values, self.column_knob, self.column_values]

    def request(
        self, settings: Settings, lane: Any, row: Any, row_values: Any, column: Any, column_values: Any
    ) -> tuple[Settings, GridProgress]:
        """One lane for each pair of values."""
        chosen = _lane(settings, lane)
        columns = axis(chosen, column, column_values) if column else None
        sweep = KnobSweep(axis(chosen, row, row_values), columns)
        if columns and columns.key == sweep.rows.key:
            raise Refusal("Rows and columns have the same knob: choose another for the columns, or none.", "sweep")
        wanted = swept(settings, lane, sweep, self.site.rules)
        check_ready(wanted.configs()[:1], self.site.chosen.surroundings(settings))
        return wanted, GridProgress(sweep, settings.length)

    def offer(self, lane: Any, lanes: Any, row: Any, column: Any) -> dict[Any, Any]:
        """Update the menus of knobs for a lane, and keep the choices that it still has."""
        try:
            known = knobs_of(_lane(Settings.read({"lanes": lanes}), lane))
        except Refusal:
            known = {}
        offered = [(label, key) for key, (label, _) in known.items()] or [("this lane has none", NONE)]
        return {
            self.row_knob: gr.update(choices=offered, value=row if row in known else offered[0][1]),
            self.column_knob: gr.update(
                choices=[("none", NONE), *((label, key) for label, key in offered if key)],
                value=column if column in known else NONE,
            ),
        }

    def open_cell(self, visit: Visit | None, lanes: Any, event: gr.EventData) -> Settings:
        """The settings of the grid with the current lanes and that of a cell beside them. Raises gr.Error, which
        prevents the run after this event.
        """
        try:
            if visit is None:
                raise Refusal("There is no grid: run one first.", "sweep")
            asked = visit.settings.lanes[whole_number(event, "cell", len(visit.settings.lanes) - 1)]
            (cell,) = Settings.read({"lanes": [asked]}).lanes
            beside = [lane for lane in Settings.read({"lanes": lanes}).lanes if lane != cell]
            if len(beside) >= LANES:
                raise Refusal(f"There are {LANES} lanes already: remove one, then choose the cell again.", "lanes")
        except Refusal as refusal:
            raise gr.Error(str(refusal), print_exception=False) from None
        return replace(visit.settings, lanes=[*beside, cell])

    def bind_menus(self, lanes: gr.components.Component) -> None:
        """Offer the knobs of the chosen lane: when the panel or a menu is opened, and when another lane is chosen."""
        menus, latest = [self.row_knob, self.column_knob], {"queue": False, "trigger_mode": "always_last", **PRIVATE}
        events = [self.fold.expand, self.lane.change, *(menu.focus for menu in menus)]
        gr.on(events, self.offer, [self.lane, lanes, *menus], menus, **latest)

    def _axis(self, name: str, label: str) -> tuple[gr.Dropdown, gr.Textbox]:
        knob = gr.Dropdown(
            [("none", NONE)], value=NONE, label=f"{label}: knob", min_width=150, scale=2, elem_id=f"sweep-{name}-knob"
        )
        values = gr.Textbox(
            label=f"{label}: values",
            placeholder="0.2, 0.7, 1.2",
            lines=1,
            max_lines=1,
            min_width=120,
            scale=2,
            elem_id=f"sweep-{name}-values",
        )
        return knob, values


class GridProgress:
    """The state of the cells so far."""

    def __init__(self, sweep: KnobSweep, length: int):
        self.sweep, self.length = sweep, length
        self.events: Facts = []  # of the kinds in WRITTEN
        self.found: dict[int, Cell] = {}
        self._written: dict[int, int] = {}  # tokens of each lane
        self._ended: set[int] = set()

    def add(self, events: Facts) -> None:
        for event in events:
            if event["kind"] in WRITTEN:
                # The candidates of a step are most of its size, and no cell shows them.
                self.events.append({**event, "top": []} if event["kind"] == "step" else event)
            if event["kind"] == "commit" and not event.get("sequence"):
                self._written[event["lane"]] = self._written.get(event["lane"], 0) + len(event.get("ids", []))
        self._ended |= {event["lane"] for event in events if event["kind"] in ("done", "failed")}

    def draw(self, headers: Facts, error: str = "") -> str:
        """The grid as HTML; the cells are made again only when another lane has ended."""
        if len(self.found) != len(self._ended):
            self.found = cells(trace_of(headers, self.events))
        failures = dict.fromkeys(cell.message for cell in self.found.values() if cell.message)
        said = "".join(f"<p>{escape(line)}</p>" for line in (self._progress(), *failures, error) if line)
        return said + grid(self.sweep, self.found, self._written)

    def _progress(self) -> str:
        asked = len(self.sweep.rows.values) * self.sweep.width
        return f"{len(self._ended)} of {asked} cells ended." if len(self._ended) < asked else ""


def grid(sweep: KnobSweep, found: dict[int, Cell], written: dict[int, int]) -> str:
    """The table: a row for each value of the first knob, a column for each of the second."""
    scales = {name: _scale([getattr(cell, name) for cell in found.values()]) for name in NUMBERS}
    rows = "".join(
        f"<tr><th scope='row'>{_value(value)}</th>"
        + "".join(
            _cell(number, found.get(number), written.get(number, 0), scales)
            for number in range(at * sweep.width, (at + 1) * sweep.width)
        )
        + "</tr>"
        for at, value in enumerate(sweep.rows.values)
    )
    label = f"{sweep.rows.label} by {sweep.columns.label}" if sweep.columns else sweep.rows.label
    box = f"<div class='knob-grid' role='region' tabindex='0' aria-label='{escape(label)}'>"
    return f"{_legend(scales)}{box}<table>{_head(sweep)}<tbody>{rows}</tbody></table></div>"


def _head(sweep: KnobSweep) -> str:
    rows = f"<span>{escape(sweep.rows.label)} ↓</span>"
    if not sweep.columns:
        return f"<thead><tr><th>{rows}</th><th></th></tr></thead>"
    values = "".join(f"<th scope='col'>{_value(value)}</th>" for value in sweep.columns.values)
    return f"<thead><tr><th>{rows}<span>{escape(sweep.columns.label)} →</span></th>{values}</tr></thead>"


def _cell(number: int, cell: Cell | None, written: int, scales: dict[str, tuple[float, float] | None]) -> str:
    if cell is None:
        return f"<td class='unfinished'>{written} tokens…</td>"
    known = [(name, getattr(cell, name)) for name in NUMBERS if getattr(cell, name) is not None]
    style = ";".join(f"--{name}:{_part(value, scales[name]):.3f}" for name, value in known)
    facts = "".join(f"<span>{_fact(name, value)}</span>" for name, value in known)
    text = escape(_beginning(cell.text)) or "<i>no text</i>"
    end = f"{cell.tokens} token{'' if cell.tokens == 1 else 's'}, {ENDS[cell.reason]}"
    return (
        f"<td style='{style}'><button type='button' data-cell='{number}' title='Add this run as a lane'>"
        f"<span class='text'>{text}</span><span class='facts'><span>{end}</span>{facts}</span></button></td>"
    )


def _fact(name: str, value: float) -> str:
    shown = NUMBERS[name][1](value)
    return f"{shown} equal" if name == "same" else shown


def _beginning(text: str) -> str:
    text = text.strip()
    return text if len(text) <= BEGINNING else text[:BEGINNING].rstrip() + "…"


def _scale(values: list[float | None]) -> tuple[float, float] | None:
    """Lowest and highest of the known values; None without any."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


def _part(value: float, scale: tuple[float, float]) -> float:
    """Where a value lies on the scale, from 0 to 1; 0 if all are the same."""
    low, high = scale
    return (value - low) / (high - low) if high > low else 0.0


def _legend(scales: dict[str, tuple[float, float] | None]) -> str:
    """The colour scale of each number; the style sheet shows that of the chosen one."""
    return "".join(
        f"<p class='scale' data-number='{name}'>{NUMBERS[name][1](scale[0])}<i></i>{NUMBERS[name][1](scale[1])}</p>"
        for name, scale in scales.items()
        if scale
    )


def _value(value: Any) -> str:
    return escape(f"{value:g}" if isinstance(value, float) else str(value))


def _lane(settings: Settings, lane: Any) -> dict[str, Any]:
    """A lane of the settings by its number. Raises Refusal."""
    if type(lane) is not int or not 0 <= lane < len(settings.lanes):
        raise Refusal("There is no such lane: choose one of the lanes above.", "sweep")
    return settings.lanes[lane]
