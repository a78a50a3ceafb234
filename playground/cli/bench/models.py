"""`bench models`: which model types of the transformers library work, tried on tiny random networks."""
from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from playground.bench.report_text import report_json
from playground.cli import terminal_view as screen
from playground.cli.bench.survey import gather
from playground.cli.input_files import check_place, write_text
from playground.cli.remaining_time import RemainingTime
from playground.cli.shared_options import CommandParser, add_out
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.bench.models.trial import Finding


def measure_options(command: CommandParser) -> None:
    command.add_argument("types", metavar="TYPE", nargs="*", help="model types, such as llama; default: all")
    add_out(command, "docs/models.json", "--json")
    command.add_argument("--page", nargs="?", const="docs/models.md", metavar="F.md",
                         help="write the table as a page, docs/models.md")


def measure(options: Namespace) -> bool:
    """Try every type, print the results, and write the requested files. After Ctrl-C, partial results are shown.

    Raises Refusal for an unknown type, and at the end if a type loads and writes another text than the library.
    """
    check_place(options.out)
    check_place(options.page)
    import transformers  # late, since these import torch

    from playground.bench.models.models_report import counts, document, page
    transformers.logging.set_verbosity_error()
    types = _chosen(options.types)
    findings: list[Finding] = []
    stopped = gather(findings, _results(types))
    for finding in findings:
        print(screen.CONTROL.sub("\ufffd", f"{finding.model_type}: {finding.outcome} {finding.reason}".rstrip()))
    print("\n" + screen.table(counts(findings), 0))
    write_text(options.out, report_json(document(transformers.__version__, findings)))
    write_text(options.page, page(transformers.__version__, findings))
    if wrong := [finding.model_type for finding in findings if finding.outcome in ("differs", "fails")]:
        raise Refusal(f"Some types should have been refused at loading: {', '.join(wrong)}.", "models")
    return stopped


def _chosen(names: list[str]) -> list[str]:
    from playground.bench.models.tiny_networks import causal_types
    known = causal_types()
    if unknown := [name for name in names if name not in known]:
        raise Refusal(f"The transformers library has no causal type {unknown[0]}: leave it out.", "types")
    return names or known


def _results(types: list[str]) -> Iterator[Finding]:
    from playground.bench.models.trial import try_type
    progress = RemainingTime()
    for number, name in enumerate(types):
        progress(number / len(types), name)
        yield try_type(name)
