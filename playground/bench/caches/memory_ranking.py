"""Cache policies ranked at equal memory: each with its best setting that fits, and what kvpress found beside it."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from playground.bench.caches.caches_defaults import TASKS
from playground.bench.caches.policy_configs import FULL
from playground.bench.caches.recall_score import Measured
from playground.bench.report_text import Rows

LIMITS = (0.25, 0.5)  # shares of a full cache
NEARLY = 1.02  # a budget in whole tokens may exceed the share by so much
NOTHING = "-"


class Placed(NamedTuple):
    """A policy's place at one task and limit: 1 is the best, and equal scores share a place."""

    place: int
    score: float
    entrant: str


class Claim(NamedTuple):
    """An ordering that kvpress published: a policy above others."""

    said: str
    above: str
    below: tuple[str, ...]


# NVIDIA/kvpress, evaluation/README.md (commit 28208b7), in words: the figures of its leaderboard are elsewhere
CLAIMS = (
    Claim("SnapKV with the question in the prompt is above all others", "snapkv",
          ("expected_attention", "key_norm", "h2o", "tova", "random_keep", "sink_window")),
    Claim("Expected Attention is above the others on Llama 3.1 8B", "expected_attention",
          ("key_norm", "h2o", "tova", "random_keep", "sink_window")),
    Claim("random eviction is above most on Mistral Nemo and Phi 3.5 mini", "random_keep", ("key_norm", "h2o", "tova")),
    Claim("StreamingLLM is above most on Mistral Nemo and Phi 3.5 mini", "sink_window", ("key_norm", "h2o", "tova")),
)


def best_that_fits(measured: Iterable[Measured], task: str, limit: float) -> dict[str, Measured]:
    """By policy its setting with the highest score of those within the limit; the smaller one of equals."""
    fitting = [each for each in measured
               if each.task == task and each.entrant != FULL and each.score and each.share <= limit * NEARLY]
    best: dict[str, Measured] = {}
    for each in sorted(fitting, key=lambda each: (-each.score.mean, each.share)):
        best.setdefault(each.series, each)
    return best


def places(measured: Sequence[Measured], task: str, limit: float) -> dict[str, Placed]:
    """The place of every policy that fits."""
    best = best_that_fits(measured, task, limit)
    scores = [each.score.mean for each in best.values()]
    return {
        name: Placed(1 + sum(score > each.score.mean for score in scores), each.score.mean, each.entrant)
        for name, each in best.items()
    }


def columns(measured: Sequence[Measured]) -> dict[tuple[str, float], dict[str, Placed]]:
    return {(task, limit): places(measured, task, limit) for task in TASKS for limit in LIMITS}


def ranking_rows(measured: Sequence[Measured]) -> Rows:
    """A row per policy, the best mean place first: its place and score at each task and limit."""
    found = columns(measured)
    names = dict.fromkeys(each.series for each in measured if each.entrant != FULL)
    header = ["policy", "mean place", *(f"{task}, at most {limit:.0%}" for task, limit in found)]
    ordered = sorted(names, key=lambda name: (_fits(name, found) < len(found), _mean_place(name, found), name))
    return [header, *([name, _shown_mean(name, found), *(_cell(column.get(name)) for column in found.values())]
                      for name in ordered)]


def _fits(name: str, found: dict) -> int:
    return sum(name in column for column in found.values())


def _mean_place(name: str, found: dict) -> float:
    return fmean([column[name].place for column in found.values() if name in column] or [len(found) * 1000.0])


def _shown_mean(name: str, found: dict) -> str:
    return f"{_mean_place(name, found):.1f}" if _fits(name, found) else NOTHING


def _cell(placed: Placed | None) -> str:
    return f"{placed.place}. {placed.score:.3f} ({placed.entrant})" if placed else NOTHING


def claim_rows(measured: Sequence[Measured]) -> Rows:
    """A row per published ordering: at each task and limit, above how many of the others the policy is here."""
    found = columns(measured)
    header = ["kvpress found", "here", *(f"{task}, at most {limit:.0%}" for task, limit in found)]
    return [header, *([claim.said, claim.above, *(_held(claim, column) for column in found.values())]
                      for claim in CLAIMS)]


def _held(claim: Claim, column: dict[str, Placed]) -> str:
    """How many of the others score lower, and how many the same."""
    others = [column[name].score for name in claim.below if name in column]
    if claim.above not in column or not others:
        return NOTHING
    own = column[claim.above].score
    equal = sum(score == own for score in others)
    return f"above {sum(score < own for score in others)} of {len(others)}" + (f", equal to {equal}" if equal else "")
