"""Scaling laws of speculation."""
from math import log10
from statistics import fmean

from playground.algorithms.speculative import speculation_math as speculation
from playground.contract import Study, knob
from playground.errors import Refusal
from playground.events import Figure, Forward, Note

COLUMNS = (
    "rounds",
    "guesses a round",
    "α from counts",
    "α from p and q",
    "tokens a round, measured",
    "predicted from α",
    "predicted from α by depth",
    "draft cost",
    "cost of a further row",
    "speed-up now, predicted",
    "best draft length",
    "speed-up there, predicted",
    "operations a token",
)
DRAFTS = 3  # sizes a law takes: through two points goes every line


class ScalingLaws(Study):
    """How likely guesses are to stand, how far ahead guessing pays, and how that grows with the size of the draft
    model.

    From counts and seconds of recorded speculative lanes: acceptance alpha, in all and by depth; tokens a round beside
    what a constant alpha predicts; the predicted speed-up for every draft length, with a pass of the draft and further
    rows of the target at their measured cost; over three or more draft models, tau = a log10 N + b. Formulas: Leviathan
    et al. 2023; the law: Yan et al. 2025, arXiv 2505.07858, which fits many trained drafts of a kind. A tree counts by
    its levels, and a longer one is predicted with as many nodes a level. A draft's N is reckoned from the operations in
    the trace.
    """

    name, title, paper, sheet = "scaling_laws", "Scaling laws of speculation", "2505.07858", "speculative/scaling-laws"
    guarantee, reconstruction = ("heuristic",), True

    gamma_max: int = knob(16, 1, 32, step=1, help="longest draft a speed-up is predicted for")
    window: int = knob(0, 0, 500, step=1, help="last rounds of a lane that count; 0: all")
    costs: str = knob(
        "measured",
        choices=("measured", "computed"),
        help="costs from seconds, or from operations as where reading weights takes all the time",
    )

    def draw(self, traces) -> list[Figure | Note]:
        lanes = [
            LaneCounts(trace, number, self, traces)
            for number, trace in enumerate(traces, 1)
            if speculation.rounds(trace)
        ]
        if not lanes:
            raise Refusal(
                "None of these lanes guesses ahead, so there is nothing to study: record a lane of speculative decoding.",
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
                "Chance that a guess stands, by its depth",
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
    """What one trace tells about its drafts."""

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
            _passes(trace),
            [
                f
                for other in traces
                if _machine(other) == _machine(trace) and other is not trace
                for f in _passes(other)
            ],
        )
        self.size = speculation.draft_parameters(own)
        self.operations = speculation.computed_costs(own)
        self.costs = speculation.measured_costs(own, others) if study.costs == "measured" else self.operations

    def speed_up(self, gamma) -> float:
        tau = speculation.block_efficiency(self.alpha or 0.0, gamma)
        return self.costs.speed_up(tau, gamma, 1 + gamma * self.nodes / self.levels)

    def numbers(self) -> tuple:
        """One value for each of COLUMNS; None where the trace cannot tell."""
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
    """The line through (size of the draft, tokens a round), or why there is none."""
    sized = {lane.header.draft or lane.label: lane.size for lane in lanes if lane.size}
    if len(set(sized.values())) < DRAFTS:
        return [
            Note(
                f"No law over draft sizes: it takes {DRAFTS} draft models of known size, and these traces hold {len(set(sized.values()))}."
            )
        ]
    groups = {
        draft: [lane for lane in lanes if (lane.header.draft or lane.label) == draft and lane.size] for draft in sized
    }
    if len({frozenset(lane.header.prompt for lane in group) for group in groups.values()}) > 1:
        return [Note("No law over draft sizes: the draft models were not run on the same prompts.")]
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
            "matrix", "Tokens a round, by size of the draft", {"rows": list(sized), "columns": columns, "values": rows}
        ),
        Note(
            f"Fitted: tokens a round = {law.slope:.3g} log10 N {law.intercept:+.3g}, R² = {law.fit:.3f}, over {len(rows)} draft models."
        ),
    ]


def _caveats(lanes) -> list[Note]:
    notes = [
        Note(
            "Predictions let every guess stand with the same chance, whatever came before; on real text they overrate long drafts."
        )
    ]
    if not all(lane.costs for lane in lanes):
        notes.append(
            Note(
                "A lane without costs shared all its passes with others, so nobody knows what its own took: record it alone."
            )
        )
    if any(lane.costs and not lane.costs.measured for lane in lanes):
        notes.append(
            Note(
                "The passes of the target all had one size, so further rows count as free: add a plain lane of the model, recorded alone."
            )
        )
    return notes


def _point(name, x, series, lines=None) -> Figure:
    return Figure("scalar", name, {"x": x, "series": series, **({"lines": lines} if lines else {})})


def _passes(trace) -> list[Forward]:
    return [stamped.event for stamped in trace.events if isinstance(stamped.event, Forward)]


def _machine(trace) -> tuple:
    """Passes of two lanes can be compared where this is the same."""
    header = trace.headers[0]
    return header.model, header.revision, header.dtype, header.device, header.quantization
