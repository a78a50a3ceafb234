"""`bench schemas`: what becomes of JSON Schemas."""
from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING

from playground.bench.schemas.cases import Case, read_cases
from playground.bench.survey_export import models_told
from playground.cli import terminal_view as screen
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import load, tell
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.bench.schemas.schema_trial import Bench, SchemaResult


def measure(options: Namespace) -> bool:
    """Try every schema, print what became of each, and write what was asked for; what Ctrl-C ends is shown as far as it
    came.

    Raises Refusal behind all that where something was accepted and then violated, so that a script sees it in the exit
    code.
    """
    cases = [case for folder in options.folders for case in read_cases(folder)]
    check_place(options.json)
    models = load(options, draft=False)
    from playground.bench.schemas.schema_trial import Bench
    from playground.bench.schemas.schemas_report import document, group_rows, schema_rows, verdict
    from playground.bench.speed_report import machine  # not before: these bring torch along
    findings: list[SchemaResult] = []
    bench = Bench(models, options.max_new_tokens, options.scribbles, options.seed)
    stopped = _gather(findings, bench, cases)
    for rows, left in ((schema_rows(findings), 2), (group_rows(findings), 1)):
        print(screen.CONTROL.sub("\ufffd", screen.table(rows, left)) + "\n")
    print(screen.CONTROL.sub("\ufffd", verdict(findings)))
    settings = {
        **models_told(models),
        "max_new_tokens": options.max_new_tokens,
        "scribbles": options.scribbles,
        "seed": options.seed,
    }
    facts = {"settings": settings, "machine": machine(models.target.device)}
    write_text(options.json, json.dumps(document(facts, findings), indent=1))
    if any(finding.violations for finding in findings):
        raise Refusal("A text was accepted that breaks its schema: the violations are named above.", "schemas")
    return stopped


def _gather(into: list[SchemaResult], bench: Bench, cases: Iterable[Case]) -> bool:
    """Findings as they come; True where Ctrl-C ended it."""
    cases = list(cases)
    try:
        for number, case in enumerate(cases):
            tell(number / len(cases), case.name)
            into.append(bench.try_one(case))
    except KeyboardInterrupt:
        return True
    finally:
        tell(1.0, "")
    return False
