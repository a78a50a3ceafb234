"""`bench repair`: what learnt prompts give compressed lanes back."""
from __future__ import annotations

from argparse import Namespace

from playground.bench.report_text import report_json
from playground.bench.weights import repair_report as report
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import load, show_progress
from playground.cli.remaining_time import RemainingTime
from playground.cli.shared_options import CommandParser, add_count, add_model, add_names, add_results, add_threads
from playground.cli.terminal_view import table as screen_table
from playground.contract.weight_change import check_changes

WEIGHTS = ("rtn:bits=3",)  # with bundled prompts


def measure_options(command: CommandParser) -> None:
    add_names(command, "only", f"some weights, as in a lane; default: {' '.join(WEIGHTS)}", "WEIGHTS")
    add_count(command, "texts", 1, 6, "held-out questions of each task whose answers are read")
    add_count(command, "questions", 0, 4, "held-out questions of each task that lanes answer; 0: none")
    add_model(command)
    add_threads(command)
    add_results(command, "docs/weights-repair.json", "docs/weights-repair.md", "write the tables as a page")


def measure(options: Namespace) -> bool:
    """Print the tables, and write the requested files. Raises Refusal."""
    wanted = list(dict.fromkeys(options.only or WEIGHTS))
    for weights in wanted:
        check_changes(weights)
    for path in (options.out, options.page):
        check_place(path)
    options.draft, options.draft_device = None, ""
    target = load(options, draft=False).target
    import playground
    from playground.bench.speed.speed_report import machine
    from playground.bench.weights.prompt_repair import held_out_texts, repaired
    changed = [playground.in_weights(target, weights, RemainingTime()) for weights in wanted]
    texts = held_out_texts(target, options.texts)
    rows = list(repaired(target, changed, texts, options.questions))
    show_progress(1.0, "")
    print("\n\n".join([screen_table(report.table(rows)), screen_table(report.share_table(rows)), report.verdict(rows)]))
    settings = {"model": target.name, "revision": target.revision, "texts": len(texts),
                "tokens of answers": sum(len(text.answer) for text in texts),
                "questions of each task": options.questions}
    facts = {"settings": settings, "machine": machine(target.device)}
    write_text(options.out, report_json(report.document(facts, rows)))
    write_text(options.page, report.page(facts, rows))
    return False
