"""Expected speed-up of speculative decoding, and the counts of a trace that go into it.

Notation: alpha is the probability that a draft token is accepted if its ancestors are, gamma the draft length, tau the
tokens per round including the token after the last accepted one. Formulas: Leviathan et al. 2023, arXiv 2211.17192.
They assume that draft tokens are accepted independently of each other, so their results are predictions.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import correlation, fmean, linear_regression, median
from typing import TYPE_CHECKING, NamedTuple

from playground.events import Draft, Forward, Verdict

if TYPE_CHECKING:
    from playground.trace import Trace


def block_efficiency(alpha: float, gamma: int) -> float:
    """Expected tau if every draft token is accepted with the same probability."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def block_efficiency_by_level(alphas: list[float], gamma: int) -> float:
    """Expected tau if acceptance depends on depth; beyond the last known depth nothing is accepted."""
    tau = reached = 1.0
    for alpha in alphas[:gamma]:
        reached *= alpha
        tau += reached
    return tau


# --- rounds ---

class DraftRound(NamedTuple):
    """One draft and its verdict."""

    levels: int  # length of the draft, or depth of its tree
    nodes: int
    accepted: int
    rejected: bool  # the round ended with a rejection, not with the end of the draft
    tokens: int  # committed: the accepted tokens and the one after them


def rounds(trace: Trace) -> list[DraftRound]:
    """Every round with draft tokens in the trace of one lane, in order."""
    events = [stamped.event for stamped in trace.events]
    drafts = {(draft.sequence, draft.round): draft for draft in events if isinstance(draft, Draft)}
    pairs = [
        (drafts.get((verdict.sequence, verdict.round)), verdict) for verdict in events if isinstance(verdict, Verdict)
    ]
    return [
        DraftRound(
            _levels(draft),
            len(draft.tokens),
            len(verdict.kept),
            verdict.origin == "redraw",
            len(verdict.kept) + (verdict.token >= 0),
        )
        for draft, verdict in pairs
        if draft
    ]


def acceptance(found: list[DraftRound]) -> float | None:
    """Maximum-likelihood alpha: accepted over tested draft tokens, not over drafted ones."""
    tested = sum(r.accepted + r.rejected for r in found)
    return sum(r.accepted for r in found) / tested if tested else None


def acceptance_by_level(found: list[DraftRound]) -> list[float]:
    """Alpha at each depth, down to the deepest tested draft token."""
    deepest = max((r.accepted + r.rejected for r in found), default=0)
    tested = [[r for r in found if r.accepted + r.rejected > level] for level in range(deepest)]
    return [fmean(r.accepted > level for r in reached) for level, reached in enumerate(tested)]


def overlap(trace: Trace) -> float | None:
    """Alpha from both models' probabilities: the mean of min(1, p/q) over first children sampled from q.

    Its expectation is 1 - TV(p, q). None if no draft token was sampled.
    """
    tests = [
        test
        for stamped in trace.events
        if isinstance(stamped.event, Verdict)
        for test in _firsts(stamped.event)
        if test.draw is not None and test.q
    ]
    return fmean(min(1.0, test.p / test.q) for test in tests) if tests else None


def _firsts(verdict: Verdict) -> list:
    """Tests of first children; later siblings are tested against the residual distribution."""
    return [test for before, test in zip([None, *verdict.tests], verdict.tests) if before is None or before.kept]


def _levels(draft: Draft) -> int:
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


# --- costs ---

@dataclass(frozen=True)
class Costs:
    """Costs of forwards, in units of a target forward with one row."""

    draft: float = 0.0  # one level of the draft
    row: float = 0.0  # one more row in a target forward
    measured: bool = True  # False if all target forwards had one size, so that further rows count as free

    def speed_up(self, tau: float, levels: float, rows: float) -> float:
        """Speed-up over plain decoding, for drafts `levels` deep that are verified in `rows` rows."""
        return tau / (levels * self.draft + 1 + self.row * (rows - 1))


def measured_costs(forwards: Iterable[Forward], plain: Iterable[Forward]) -> Costs | None:
    """Costs from wall-clock seconds: the draft's from a lane's `forwards`, the target's also from other lanes.

    Forwards shared by several lanes do not count, because their cost per lane is unknown. None if no others are left.
    """
    own, others = ([f for f in part if f.lanes == 1] for part in (forwards, plain))
    target, draft = _medians([*_of_target(own), *_of_target(others)]), [f.seconds for f in _of_draft(own)]
    if not target or not min(target.values()) > 0:
        return None
    slope, start = linear_regression(*zip(*target.items())) if len(target) > 1 else (0.0, next(iter(target.values())))
    slope = max(0.0, slope)
    single = target.get(1) or max(start + slope, min(target.values()))
    return Costs(median(draft) / single if draft else 0.0, slope / single, len(target) > 1)


def computed_costs(forwards: Iterable[Forward]) -> Costs | None:
    """Costs from FLOPs, assuming that decoding is bound by memory bandwidth, so that further rows are free."""
    own = list(forwards)
    target, draft = (_flops_per_row(part) for part in (_of_target(own), _of_draft(own)))
    return Costs(draft / target) if target else None


def draft_parameters(forwards: Iterable[Forward]) -> float | None:
    """Parameters of the draft model from its FLOPs: two per parameter and row, plus a term linear in the context.

    None if the trace has fewer than two context lengths.
    """
    points = {
        (f.context + f.tokens / 2, f.flops / f.tokens)
        for f in _of_draft(list(forwards))
        if f.flops and f.stream == "draft"
    }
    if len({x for x, _ in points}) < 2:
        return None
    return linear_regression(*zip(*points)).intercept / 2


def _of_target(forwards: list[Forward]) -> list[Forward]:
    """Decode forwards through all layers."""
    deepest = max((f.layers for f in forwards), default=0)
    return [f for f in forwards if f.stream == "target" and f.layers == deepest and f.phase == "decode"]


def _of_draft(forwards: list[Forward]) -> list[Forward]:
    """Forwards of a draft model, or of the target's first layers."""
    return [f for f in forwards if f.phase != "prefill" and f.stream in ("draft", "exit")]


def _medians(forwards: list[Forward]) -> dict[int, float]:
    """Median seconds by number of rows."""
    seconds = defaultdict(list)
    for f in forwards:
        seconds[f.tokens].append(f.seconds)
    return {rows: median(times) for rows, times in sorted(seconds.items())}


def _flops_per_row(forwards: list[Forward]) -> float:
    return sum(f.flops for f in forwards) / sum(f.tokens for f in forwards) if forwards else 0.0


# --- a line through several drafts ---

class LineFit(NamedTuple):
    """y = slope * x + intercept; `fit` is R squared."""

    slope: float
    intercept: float
    fit: float


def line(xs: list[float], ys: list[float]) -> LineFit:
    """Least-squares line through at least two points."""
    slope, intercept = linear_regression(xs, ys)
    return LineFit(slope, intercept, correlation(xs, ys) ** 2 if len(set(ys)) > 1 else 1.0)
