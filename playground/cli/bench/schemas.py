"""`bench schemas`: how JSON Schemas are compiled, followed and violated."""
from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from playground.bench.report_text import report_json
from playground.bench.schemas.cases import Case, read_cases
from playground.bench.survey.survey_export import model_facts
from playground.cli import terminal_view as screen
from playground.cli.bench.survey import gather
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import load
from playground.cli.remaining_time import RemainingTime
from playground.cli.shared_options import CommandParser, add_count, add_model, add_out
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.bench.schemas.schema_trial import SchemaResult, SchemaTrial


def measure_options(command: CommandParser) -> None:
    command.add_argument("folders", metavar="FOLDER", nargs="+",
                         help="schemas, as in JSONSchemaBench or in the official JSON Schema Test Suite; or a file")
    add_count(command, "scribbles", 0, 4, "random texts per schema, besides the model's")
    add_count(command, "max-new-tokens", 1, 64)
    add_count(command, "seed", 0, 0)
    add_model(command)
    command.set_defaults(draft=None, draft_device="")
    add_out(command, "schemas.json", "--json")


def measure(options: Namespace) -> bool:
    """Test every schema, print the results, and write the requested file. After Ctrl-C, partial results are shown.

    Raises Refusal at the end if an accepted schema was violated, so that a script sees it in the exit code.
    """
    cases = [case for folder in options.folders for case in read_cases(folder)]
    check_place(options.out)
    models = load(options, draft=False)
    from playground.bench.schemas.schema_trial import SchemaTrial  # late, since these import torch
    from playground.bench.schemas.schemas_report import document, group_rows, schema_rows, verdict
    from playground.bench.speed.speed_report import machine
    findings: list[SchemaResult] = []
    trial = SchemaTrial(models, options.max_new_tokens, options.scribbles, options.seed)
    stopped = gather(findings, _results(trial, cases))
    for rows, left in ((schema_rows(findings), 2), (group_rows(findings), 1)):
        print(screen.CONTROL.sub("\ufffd", screen.table(rows, left)) + "\n")
    print(screen.CONTROL.sub("\ufffd", verdict(findings)))
    settings = {
        **model_facts(models),
        "max_new_tokens": options.max_new_tokens,
        "scribbles": options.scribbles,
        "seed": options.seed,
    }
    facts = {"settings": settings, "machine": machine(models.target.device)}
    write_text(options.out, report_json(document(facts, findings)))
    if any(finding.violations for finding in findings):
        raise Refusal("A text was accepted that violates its schema: the violations are listed above.", "schemas")
    return stopped


def _results(trial: SchemaTrial, cases: Sequence[Case]) -> Iterator[SchemaResult]:
    progress = RemainingTime()
    for number, case in enumerate(cases):
        progress(number / len(cases), case.name)
        yield trial.try_one(case)
