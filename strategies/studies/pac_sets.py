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

SHOWN = 40  # parts in the table


class PACSets(Study):
    """Remove the parts of a program that the model was least confident in, so that the remaining partial program covers
    the true program for all but a share `eps` of programs.

    Subtrees of the syntax tree are removed until the rest costs at most -log tau nats: as few parts as possible, in at
    most `holes` holes, and a part removed at one tau is also removed at every larger one. tau is the smallest threshold
    at which the true programs missed in a calibration set are few enough for confidence 1 - delta. The guarantee holds
    on average over prompts like those of the calibration, for the same model and greedy decoding, not for a single
    prompt, and it concerns the text of a program, not its behaviour. Khakhar, Mell and Bastani 2023, arXiv 2302.08703;
    the exact solver is ours, and a text that is not a program is one hole.
    """

    name, title, paper, sheet = "pac_sets", "PAC prediction sets for code", "2302.08703", "search/pac-prediction-sets"
    guarantee = ("heuristic",)

    eps: float = knob(0.3, 0.02, 0.9, step=0.01, help="share of true programs that may be missed")
    delta: float = knob(0.1, 0.01, 0.2, step=0.01, help="probability that the guarantee fails")
    holes: int = knob(3, 1, 4, step=1, help="maximum number of holes")
    tau: float = knob(
        0.0, 0.0, 1.0, step=0.01, help="threshold set by hand; 0: the calibrated one, the only one with a guarantee"
    )
    calibration: str = knob(
        "",
        multiline=True,
        file=True,
        help="output of `python tools/calibrate.py`; empty: that of the bundled model",
    )

    def draw(self, traces) -> list[Figure | Note]:
        if not any(map(written, traces)):
            raise Refusal(
                "None of these texts is a Python program: record a lane that writes one.",
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
                f"{len(starts)} programs are too few for a guarantee: {needed} are needed, or a larger eps or delta.",
                "eps",
            )
        return self.tau or calibrated(starts, misses)

    def _promise(self, calibration: Calibration, tau: float) -> str:
        starts = calibration.thresholds(self.holes)
        misses = allowed(len(starts), self.eps, self.delta)
        if self.tau:
            return f"tau {tau:.3g} was chosen by hand and has no guarantee."
        missed = sum(start > tau for start in starts)
        return (
            f"Of {len(starts)} calibration programs ({calibration.about}), {misses} may be missed: tau is {tau:.3g}, "
            f"at which {missed} are missed."
        )

    def _coverage(self, calibration: Calibration) -> list[Figure]:
        starts = calibration.thresholds(self.holes)
        return [
            Figure(
                "scalar",
                "calibration programs covered, by threshold",
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
        other = (header.model, header.revision) != (calibration.model, calibration.revision)
        warning = (
            f" The calibration was made with another model, {calibration.model}, and does not apply here."
            if other
            else ""
        )
        if program is None:
            return [Note(f"{label}: this text is not a Python program, so all of it is one hole.{warning}")]
        cut = (
            frozenset([0])
            if tau >= WHOLE
            else cuts(program, self.holes, tuple(step for step in GRID if step < tau) + (tau,))[-1]
        )
        lost = {part for hole in cut for part in program.under(hole)}
        parts = [part for part, own in enumerate(program.own) if own]
        text = drawn(program, cut).replace("\n", "⏎")
        return [
            Note(f"{label}: {sum(part not in lost for part in parts)} of {len(parts)} parts remain: {text}{warning}"),
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
                "columns": ["cost, nats", "remains"],
                "values": [[program.costs[part], float(part not in lost)] for part in order],
            },
        )
