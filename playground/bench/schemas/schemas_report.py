"""Results of the schema benchmark: a row per schema, a row per group, violations, and everything as JSON."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from playground.bench.report_text import Rows
from playground.bench.schemas.schema_trial import OUTCOMES, MaskTime, SchemaResult

FORMAT, VERSION = "decoding-playground-schemas", 1
TIMES = ("compile ms", "mask us", "99 %", "compute", "unpack", "apply")
REASON = 110  # characters of a reason in a table


def schema_rows(findings: Sequence[SchemaResult]) -> Rows:
    """A table of schemas, header first."""
    rows = [
        [finding.case.name, finding.outcome, *times([finding]), " ".join(finding.reason.split())[:REASON]]
        for finding in findings
    ]
    return [["schema", "outcome", *TIMES, "reason"], *rows]


def group_rows(findings: Sequence[SchemaResult]) -> Rows:
    """A table of groups with a total row last: numbers of schemas by outcome, and of instances."""
    by_group = [list(some) for _, some in groupby(sorted(findings, key=_group), key=_group)]
    rows = [_totals(_group(some[0]), some) for some in by_group] + [_totals("all", findings)]
    return [["group", "schemas", *OUTCOMES, "instances", "wrongly rejected", "wrongly accepted", *TIMES, ""], *rows]


def _group(finding: SchemaResult) -> str:
    return finding.case.group


def _totals(name: str, findings: Sequence[SchemaResult]) -> list[str]:
    outcomes = Counter(finding.outcome for finding in findings)
    accepted = [finding for finding in findings if finding.outcome != "refused"]
    counts = [
        len(findings),
        *(outcomes[outcome] for outcome in OUTCOMES),
        sum(len(finding.case.instances) for finding in accepted),
        sum(len(finding.forbidden) for finding in accepted),
        sum(len(finding.let_through) for finding in accepted),
    ]
    return [name, *map(str, counts), *times(findings), ""]


def times(findings: Iterable[SchemaResult]) -> list[str]:
    """The cells of TIMES: median compile time in ms; median and 99th percentile of mask times in microseconds, and the
    medians of their three parts.
    """
    accepted = [finding for finding in findings if not finding.refusal]
    masks = [mask for finding in accepted for mask in finding.masks]
    if not masks:
        return ["-"] * len(TIMES)
    compiled = median(finding.compile_seconds for finding in accepted) * 1e3
    return [f"{compiled:.1f}", *(f"{seconds * 1e6:.0f}" for seconds in mask_seconds(masks))]


def mask_seconds(masks: Sequence[MaskTime]) -> list[float]:
    """Median and 99th percentile of whole masks; medians of compute, unpack and apply."""
    whole = sorted(mask.whole for mask in masks)
    return [median(whole), whole[int(0.99 * (len(whole) - 1))], *(median(part) for part in zip(*masks))]


def verdict(findings: Sequence[SchemaResult]) -> str:
    """The violations of accepted schemas, a line each, or a sentence that there are none."""
    broken = [f"{finding.case.name}: {violation}" for finding in findings for violation in finding.violations]
    return "\n".join([f"{len(broken)} violations:", *broken]) if broken else "No accepted schema was violated."


def document(facts: dict[str, Any], findings: Sequence[SchemaResult]) -> dict[str, Any]:
    """Plain data for JSON. facts: settings and machine."""
    return {"format": FORMAT, "version": VERSION, **facts, "schemas": [_as_json(finding) for finding in findings]}


def _as_json(finding: SchemaResult) -> dict[str, Any]:
    names = ("median", "p99", "compute", "unpack", "apply")
    return {
        "name": finding.case.name,
        "group": finding.case.group,
        "outcome": finding.outcome,
        "reason": finding.reason,
        "compile_seconds": finding.compile_seconds,
        "violations": finding.violations,
        "forbidden": finding.forbidden,
        "instances": len(finding.case.instances),
        "masks": len(finding.masks),
        "mask_seconds": dict(zip(names, mask_seconds(finding.masks))) if finding.masks else {},
        "texts": [
            {"by": writing.by, "text": writing.text, "outcome": writing.verdict.outcome} for writing in finding.writings
        ],
    }
