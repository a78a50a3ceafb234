"""What speculation gains: the arithmetic of guessing ahead, and the counts of a trace that go into it.

Notation: alpha is the chance that a guess stands whose parents stood, gamma the guesses made one after another, tau the
tokens a round yields, the one after the last guess counted. Formulas: Leviathan et al. 2023, arXiv 2211.17192. They
take guesses to stand independently of each other, so what they give is a prediction.
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
    """Expected tau where every guess stands with the same chance."""
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def block_efficiency_by_level(alphas: list[float], gamma: int) -> float:
    """Expected tau where the chance depends on the depth of the guess; beyond the deepest one known nothing stands."""
    tau = survives = 1.0
    for alpha in alphas[:gamma]:
        survives *= alpha
        tau += survives
    return tau


# --- rounds ---

class DraftRound(NamedTuple):
    """One draft and its verdict."""

    levels: int  # of the draft: its length, or the depth of its tree
    nodes: int
    kept: int
    refused: bool  # after the kept guesses came one that was looked at and refused
    tokens: int  # committed: the kept guesses and the token after them


def rounds(trace: Trace) -> list[DraftRound]:
    """Every round of a trace of one lane that guessed something, in order."""
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
    """The most likely alpha. A round whose draft ran out before a refusal tells of no refusal: accepted over looked at,
    not over drafted.
    """
    looked_at = sum(r.kept + r.refused for r in found)
    return sum(r.kept for r in found) / looked_at if looked_at else None


def acceptance_by_level(found: list[DraftRound]) -> list[float]:
    """Alpha at each depth, down to the deepest guess that was looked at."""
    deepest = max((r.kept + r.refused for r in found), default=0)
    looked_at = [[r for r in found if r.kept + r.refused > level] for level in range(deepest)]
    return [fmean(r.kept > level for r in reached) for level, reached in enumerate(looked_at)]


def overlap(trace: Trace) -> float | None:
    """Alpha from the two models' probabilities: the mean of min(1, p/q) over first guesses drawn from q, whose
    expectation is 1 - TV(p, q).
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
    """The tests that followed an acceptance or came first; those of further siblings are against what was left over."""
    return [test for before, test in zip([None, *verdict.tests], verdict.tests) if before is None or before.kept]


def _levels(draft: Draft) -> int:
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


# --- costs ---

@dataclass(frozen=True)
class Costs:
    """What passes cost, in units of one that gives the target a single row."""

    draft: float = 0.0  # one guess deeper
    row: float = 0.0  # one more row in a pass of the target
    measured: bool = True  # False where no passes of two sizes were there to compare, so more rows count as free

    def speed_up(self, tau: float, levels: float, rows: float) -> float:
        """Tokens for the cost of plain decoding's one, for rounds `levels` deep whose verification takes `rows` rows.
        """
        return tau / (levels * self.draft + 1 + self.row * (rows - 1))


def measured_costs(passes: Iterable[Forward], plain: Iterable[Forward]) -> Costs | None:
    """From seconds: the draft's from a lane's `passes`, the target's also from other lanes of the same model.

    Passes that several lanes shared do not count: nobody knows what one of them alone would have taken. None without
    others.
    """
    own, others = ([f for f in part if f.lanes == 1] for part in (passes, plain))
    target, draft = _medians([*_of_target(own), *_of_target(others)]), [f.seconds for f in _of_draft(own)]
    if not target or not min(target.values()) > 0:
        return None
    slope, start = linear_regression(*zip(*target.items())) if len(target) > 1 else (0.0, next(iter(target.values())))
    slope = max(0.0, slope)
    single = target.get(1) or max(start + slope, min(target.values()))
    return Costs(median(draft) / single if draft else 0.0, slope / single, len(target) > 1)


def computed_costs(passes: Iterable[Forward]) -> Costs | None:
    """From FLOPs, where reading the weights takes all the time: a draft costs as its operations, more rows cost
    nothing.
    """
    own = list(passes)
    target, draft = (_flops_a_row(part) for part in (_of_target(own), _of_draft(own)))
    return Costs(draft / target) if target else None


def draft_parameters(passes: Iterable[Forward]) -> float | None:
    """Weights of the draft model, from its operations: two a weight and row, and what grows with the context. None
    where the trace cannot tell.
    """
    points = {
        (f.context + f.tokens / 2, f.flops / f.tokens)
        for f in _of_draft(list(passes))
        if f.flops and f.stream == "draft"
    }
    if len({x for x, _ in points}) < 2:
        return None
    return linear_regression(*zip(*points)).intercept / 2


def _of_target(passes: list[Forward]) -> list[Forward]:
    """Decoding passes through all layers."""
    deepest = max((f.layers for f in passes), default=0)
    return [f for f in passes if f.stream == "target" and f.layers == deepest and f.phase == "decode"]


def _of_draft(passes: list[Forward]) -> list[Forward]:
    """Passes of another model, or of the target's first layers."""
    return [f for f in passes if f.phase != "prefill" and f.stream in ("draft", "exit")]


def _medians(passes: list[Forward]) -> dict[int, float]:
    """Seconds by rows."""
    seconds = defaultdict(list)
    for f in passes:
        seconds[f.tokens].append(f.seconds)
    return {rows: median(times) for rows, times in sorted(seconds.items())}


def _flops_a_row(passes: list[Forward]) -> float:
    return sum(f.flops for f in passes) / sum(f.tokens for f in passes) if passes else 0.0


# --- a law over several drafts ---

class LineFit(NamedTuple):
    """y = slope * x + intercept; `fit` is R squared, 1 where the points lie on the line."""

    slope: float
    intercept: float
    fit: float


def line(xs: list[float], ys: list[float]) -> LineFit:
    """Least squares through at least two places."""
    slope, intercept = linear_regression(xs, ys)
    return LineFit(slope, intercept, correlation(xs, ys) ** 2 if len(set(ys)) > 1 else 1.0)
