"""Scaling laws of speculation."""
from math import log10
from statistics import fmean

from playground.algorithms.speculative import speculation_math as speculation
from playground.contract import Study, knob
from playground.errors import Refusal
from playground.events import Figure, Forward, Note

COLUMNS = (
    "rounds",
    "draft tokens per round",
    "α from counts",
    "α from p and q",
    "tokens per round, measured",
    "predicted from α",
    "predicted from α by depth",
    "draft cost",
    "cost of a further token",
    "speed-up as recorded, predicted",
    "best draft length",
    "speed-up at that length, predicted",
    "operations per token",
)
DRAFTS = 3  # sizes needed for a fit: two points determine a line exactly


class ScalingLaws(Study):
    """Acceptance rate of draft tokens, best draft length, and their scaling with the size of the draft model.

    From the counts and timings of recorded speculative lanes: the acceptance rate alpha, overall and by depth; tokens
    per round compared with the prediction for a constant alpha; the predicted speed-up for every draft length, with the
    measured cost of a draft forward and of further input tokens of the target; over three or more draft models, tau = a
    log10 N + b. Formulas: Leviathan et al. 2023; the law: Yan et al. 2025, arXiv 2505.07858, which fits many drafts
    trained alike. A tree counts by its levels, and a deeper one is predicted with the same number of nodes per level. A
    draft's N is computed from the operations in the trace.
    """

    name, title, paper, sheet = "scaling_laws", "Scaling laws of speculation", "2505.07858", "speculative/scaling-laws"
    guarantee, reconstruction = ("heuristic",), True

    gamma_max: int = knob(16, 1, 32, step=1, help="longest draft length to predict a speed-up for")
    window: int = knob(0, 0, 500, step=1, help="number of last rounds of a lane to use; 0: all")
    costs: str = knob(
        "measured",
        choices=("measured", "computed"),
        help="costs from measured seconds, or computed as if reading the weights took all the time",
    )

    def draw(self, traces) -> list[Figure | Note]:
        lanes = [
            LaneCounts(trace, number, self, traces)
            for number, trace in enumerate(traces, 1)
            if speculation.rounds(trace)
        ]
        if not lanes:
            raise Refusal(
                "None of these lanes uses speculation: record a lane of speculative decoding.",
                "traces",
            )
        curves = [lane for lane in lanes if lane.costs]
        table = Figure(
            "matrix",
            "Speculation",
            {
                "rows": list(COLUMNS),
                "columns": [lane.label for lane in lanes],
                "values": [list(row) for row in zip(*(lane.numbers() for lane in lanes))],
            },
        )
        depth = max(len(lane.alphas) for lane in lanes)
        alphas = [
            _point(
                "Acceptance rate of draft tokens, by depth",
                level,
                {lane.label: lane.alphas[level - 1] for lane in lanes if level <= len(lane.alphas)},
            )
            for level in range(1, depth + 1)
        ]
        speeds = [
            _point(
                "Predicted speed-up, by draft length",
                gamma,
                {lane.label: lane.speed_up(gamma) for lane in curves},
                {"plain decoding": 1.0},
            )
            for gamma in range(self.gamma_max + 1)
            if curves
        ]
        return [table, *alphas, *speeds, *_caveats(lanes), *_law(lanes)]


class LaneCounts:
    """Acceptance, costs and sizes of one trace."""

    def __init__(self, trace, number, study, traces):
        self.header, self.study = trace.headers[0], study
        self.label = f"{number} · {self.header.title or self.header.strategy}"
        self.rounds = speculation.rounds(trace)[-study.window:]
        self.alpha, self.alphas = speculation.acceptance(self.rounds), speculation.acceptance_by_level(self.rounds)
        self.overlap = speculation.overlap(trace)
        self.tau, self.levels, self.nodes = (
            fmean(column) for column in zip(*((r.tokens, r.levels, r.nodes) for r in self.rounds))
        )
        own, others = (
            _forwards(trace),
            [
                f
                for other in traces
                if _machine(other) == _machine(trace) and other is not trace
                for f in _forwards(other)
            ],
        )
        self.size = speculation.draft_parameters(own)
        self.operations = speculation.computed_costs(own)
        self.costs = speculation.measured_costs(own, others) if study.costs == "measured" else self.operations

    def speed_up(self, gamma) -> float:
        tau = speculation.block_efficiency(self.alpha or 0.0, gamma)
        return self.costs.speed_up(tau, gamma, 1 + gamma * self.nodes / self.levels)

    def numbers(self) -> tuple:
        """One value for each of COLUMNS; None if the trace does not contain it."""
        constant = fmean(speculation.block_efficiency(self.alpha or 0.0, r.levels) for r in self.rounds)
        by_depth = fmean(speculation.block_efficiency_by_level(self.alphas, r.levels) for r in self.rounds)
        known = (len(self.rounds), self.levels, self.alpha, self.overlap, self.tau, constant, by_depth)
        return (
            *known,
            *self._gains(),
            (self.levels * self.operations.draft + self.nodes + 1) / self.tau if self.operations else None,
        )

    def _gains(self) -> tuple:
        if not self.costs:
            return (None,) * 5
        best = max(range(self.study.gamma_max + 1), key=self.speed_up)
        now = self.costs.speed_up(self.tau, self.levels, self.nodes + 1)
        return self.costs.draft, self.costs.row, now, best, self.speed_up(best)


def _law(lanes) -> list[Figure | Note]:
    """The fit of tokens per round over draft sizes, or a note on why there is none."""
    sized = {lane.header.draft or lane.label: lane.size for lane in lanes if lane.size}
    if len(set(sized.values())) < DRAFTS:
        return [
            Note(
                f"No scaling law: it needs {DRAFTS} draft models of known size, and these traces have "
                f"{len(set(sized.values()))}."
            )
        ]
    groups = {
        draft: [lane for lane in lanes if (lane.header.draft or lane.label) == draft and lane.size] for draft in sized
    }
    if len({frozenset(lane.header.prompt for lane in group) for group in groups.values()}) > 1:
        return [Note("No scaling law: the draft models were not run on the same prompts.")]
    sizes, taus = (
        [log10(size) for size in sized.values()],
        [fmean(lane.tau for lane in group) for group in groups.values()],
    )
    law = speculation.line(sizes, taus)
    rows = [
        [size, tau, law.slope * size + law.intercept, tau - law.slope * size - law.intercept]
        for size, tau in zip(sizes, taus)
    ]
    columns = ["log10 N", "measured", "fitted", "residual"]
    return [
        Figure(
            "matrix", "Tokens per round, by draft size", {"rows": list(sized), "columns": columns, "values": rows}
        ),
        Note(
            f"Fitted: tokens per round = {law.slope:.3g} log10 N {law.intercept:+.3g}, R² = {law.fit:.3f}, over "
            f"{len(rows)} draft models."
        ),
    ]


def _caveats(lanes) -> list[Note]:
    notes = [
        Note(
            "Predictions assume that all draft tokens are accepted independently with the same probability; on real "
            "text this overestimates long drafts."
        )
    ]
    if not all(lane.costs for lane in lanes):
        notes.append(
            Note(
                "A lane without costs shared all its forwards with other lanes, so its own cost is unknown: record it "
                "alone."
            )
        )
    if any(lane.costs and not lane.costs.measured for lane in lanes):
        notes.append(
            Note(
                "All forwards of the target had the same size, so further tokens count as free: add a plain lane "
                "of the model, recorded alone."
            )
        )
    return notes


def _point(name, x, series, lines=None) -> Figure:
    return Figure("scalar", name, {"x": x, "series": series, **({"lines": lines} if lines else {})})


def _forwards(trace) -> list[Forward]:
    return [stamped.event for stamped in trace.events if isinstance(stamped.event, Forward)]


def _machine(trace) -> tuple:
    """Timings of two lanes are comparable if this is equal."""
    header = trace.headers[0]
    return header.model, header.revision, header.dtype, header.device, header.quantization
