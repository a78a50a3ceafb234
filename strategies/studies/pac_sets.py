"""PAC prediction sets for code."""
from math import ceil, log

from playground.algorithms.programs.partial_programs import (
    GRID,
    WHOLE,
    Calibration,
    Program,
    allowed,
    calibrated,
    cuts,
    drawn,
    written,
)
from playground.contract import Study, knob
from playground.errors import Refusal
from playground.events import Figure, Note

SHOWN = 40  # parts


class PACSets(Study):
    """Cut out of a program what the model was least sure of, just enough that the true program is among the completions
    of what is left, for all but a share `eps` of programs.

    Parts of the syntax tree are lost, with all below them, until what stays costs -log tau nats at most: as few parts
    as possible, in at most `holes` holes, and what is lost at one tau stays lost at every larger one. tau is the
    smallest at which no more of a calibration's true programs are missed than says so with confidence 1 - delta. This
    holds over prompts like those, for the same model and greedy writing, not for one prompt; and it is about the
    letters of a program, not about what it does. Khakhar, Mell and Bastani 2023, arXiv 2302.08703; the exact solver is
    ours, and a text that is no program is one hole.
    """

    name, title, paper, sheet = "pac_sets", "PAC prediction sets for code", "2302.08703", "search/pac-prediction-sets"
    guarantee = ("heuristic",)

    eps: float = knob(0.3, 0.02, 0.9, step=0.01, help="share of true programs that may be missed")
    delta: float = knob(0.1, 0.01, 0.2, step=0.01, help="chance that the calibration was luck")
    holes: int = knob(3, 1, 4, step=1, help="holes at most")
    tau: float = knob(
        0.0, 0.0, 1.0, step=0.01, help="threshold to play with; 0: the calibrated one, which alone promises anything"
    )
    calibration: str = knob(
        "",
        multiline=True,
        file=True,
        help="made by `python -m playground.bench.calibrate`; empty: that of the bundled model",
    )

    def draw(self, traces) -> list[Figure | Note]:
        if not any(map(written, traces)):
            raise Refusal(
                "None of these texts is a Python program, so there is nothing to study: record a lane that writes one.",
                "traces",
            )
        calibration = Calibration.read(self.calibration)
        tau = self._threshold(calibration)
        found = [Note(self._promise(calibration, tau)), *self._coverage(calibration)]
        for number, trace in enumerate(traces, 1):
            found += self._lane(
                f"{number} · {trace.headers[0].title or trace.headers[0].strategy}", trace, calibration, tau
            )
        return found

    def _threshold(self, calibration: Calibration) -> float:
        starts = calibration.thresholds(self.holes)
        misses = allowed(len(starts), self.eps, self.delta)
        if misses is None:
            needed = ceil(log(self.delta) / log(1 - self.eps))
            raise Refusal(
                f"{len(starts)} programs are too few to say so: {needed} are needed, or a larger eps or delta.", "eps"
            )
        return self.tau or calibrated(starts, misses)

    def _promise(self, calibration: Calibration, tau: float) -> str:
        starts = calibration.thresholds(self.holes)
        misses = allowed(len(starts), self.eps, self.delta)
        if self.tau:
            return f"tau {tau:.3g} was chosen by hand and promises nothing."
        return (
            f"Of {len(starts)} programs of the calibration ({calibration.about}) {misses} may be missed: tau is {tau:.3g}, "
            f"and {sum(start > tau for start in starts)} are missed there."
        )

    def _coverage(self, calibration: Calibration) -> list[Figure]:
        starts = calibration.thresholds(self.holes)
        return [
            Figure(
                "scalar",
                "programs of the calibration that are covered, by threshold",
                {
                    "x": step,
                    "axis": "step of tau",
                    "series": {"covered": sum(start <= tau for start in starts) / len(starts)},
                    "lines": {"1 - eps": 1 - self.eps},
                },
            )
            for step, tau in enumerate(GRID)
        ]

    def _lane(self, label: str, trace, calibration: Calibration, tau: float) -> list[Figure | Note]:
        header, program = trace.headers[0], written(trace)
        strange = (header.model, header.revision) != (calibration.model, calibration.revision)
        warning = (
            f" The calibration is of {calibration.model}, another model, and says nothing about this one."
            if strange
            else ""
        )
        if program is None:
            return [Note(f"{label}: this text is no Python program, so all of it is one hole.{warning}")]
        cut = (
            frozenset([0])
            if tau >= WHOLE
            else cuts(program, self.holes, tuple(step for step in GRID if step < tau) + (tau,))[-1]
        )
        lost = {part for hole in cut for part in program.under(hole)}
        parts = [part for part, own in enumerate(program.own) if own]
        text = drawn(program, cut).replace("\n", "⏎")
        return [
            Note(f"{label}: {sum(part not in lost for part in parts)} of {len(parts)} parts stay: {text}{warning}"),
            self._parts(label, program, lost),
        ]

    def _parts(self, label: str, program: Program, lost: set[int]) -> Figure:
        order = range(1, min(len(program.own), SHOWN + 1))
        rows = [f"{part} {program.own[part]}" for part in order]
        return Figure(
            "matrix",
            f"{label}: parts",
            {
                "rows": rows,
                "columns": ["costs, nats", "stays"],
                "values": [[program.costs[part], float(part not in lost)] for part in order],
            },
        )
