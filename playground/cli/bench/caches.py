"""`bench caches`: recall, memory and step time of the cache policies."""
from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.bench.caches.caches_defaults import BUDGETS, PACED, PARTS, SHAPES, WEIGHED
from playground.bench.report_text import report_json
from playground.bench.survey.results import answered_by_all
from playground.bench.survey.survey import Answer, Progress
from playground.cli import terminal_view as screen
from playground.cli.bench.survey import check_some, gather, load_for, model_facts, timed
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import set_up, show_progress
from playground.cli.remaining_time import RemainingTime, counted
from playground.cli.shared_options import (
    HELD_OUT,
    CommandParser,
    add_count,
    add_model,
    add_names,
    add_results,
    add_threads,
    at_least,
)
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.bench.caches.caches_report import Findings

FIGURES = "caches.json"
PAGE = "docs/caches.md"


def measure_options(command: CommandParser) -> None:
    command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                         help=f"some of {', '.join(PARTS)}; default: all")
    add_names(command, "only", "some of the cache policies; default: all. With --parts score, --page renews their rows")
    command.add_argument("--budgets", nargs="+", type=at_least(8), default=list(BUDGETS), metavar="N",
                         help="score: budgets in tokens of the prompt")
    add_count(command, "questions", 1, 12, f"score: {HELD_OUT}")
    command.add_argument("--shape", choices=SHAPES, metavar="S",
                         help="memory, step: a network of random weights, one of "
                         f"{', '.join(SHAPES)}; default: {WEIGHED} and {PACED}")
    add_count(command, "kept", 8, 512, "memory, step: budget in tokens of the prompt")
    add_count(command, "tokens", 16, 8000, "memory: tokens of the prompt")
    add_count(command, "written", 2, 64, "memory: tokens after the prompt")
    add_count(command, "behind", 16, 768, "step: tokens of the prompt")
    add_count(command, "rounds", 1, 30, "step: measured steps per lane, after some that are dropped")
    add_count(command, "seed", 0, 1)
    add_model(command)
    command.set_defaults(draft=None, draft_device="")
    add_threads(command)
    add_results(command, FIGURES, PAGE, "write a page, and its figure next to it")


def measure(options: Namespace) -> bool:
    """Measure the requested parts, print their tables, and write the requested files. After Ctrl-C, what was measured
    until then is shown and written.
    """
    for path in (options.out, options.page):
        check_place(path)
    if options.only:
        _check_only(options)
    set_up(options)
    import torch

    from playground.bench.caches.caches_report import Findings  # late, since these import torch
    from playground.bench.speed.speed_report import machine
    findings = Findings({"settings": _settings(options), "machine": machine(torch.device("cpu"))})
    stopped = _measure(findings, options)
    _show(findings)
    write_text(options.out, report_json(findings.to_json()))
    if options.page is not None and not (stopped and options.only):  # rows of fewer questions do not fit the others
        _write_page(Path(options.page), findings, options)
    return stopped


def _measure(findings: Findings, options: Namespace) -> bool:
    """Measure the requested parts; returns True if Ctrl-C stopped that after something was measured."""
    try:
        for part in dict.fromkeys(options.parts):
            {"score": _score, "memory": _memory, "step": _step}[part](findings, options)
    except KeyboardInterrupt:
        check_some(findings.tables())
        findings.facts["settings"]["stopped"] = "with Ctrl-C before all was measured"
        return True
    finally:
        show_progress(1.0, "")
    return False


def _check_only(options: Namespace) -> None:
    """Raise Refusal for a name that is no cache policy, and for a page whose rows cannot be renewed."""
    from playground.bench.caches.policy_configs import policies
    from playground.bench.caches.renewed_page import check_settings, measured_in
    policies(options.only)
    if options.page is None or not Path(options.page).exists():
        return
    if options.parts != ["score"]:
        raise Refusal("The rows of some policies are renewed for their scores alone: add --parts score.", "parts")
    page = Path(options.page).read_text(encoding="utf-8")
    measured_in(page, options.questions)
    check_settings(page, _settings(options))


def _settings(options: Namespace) -> dict[str, Any]:
    names = ("parts", "budgets", "questions", "seed", "tokens", "written", "kept", "behind", "rounds")
    settings = {
        name: " ".join(map(str, value)) if isinstance(value := getattr(options, name), list) else value
        for name in names
    }
    return settings | {"weighed": options.shape or WEIGHED, "paced": options.shape or PACED}


def _score(findings: Findings, options: Namespace) -> None:
    from playground.bench.caches.recall_score import RecallTrial, questions
    models = load_for([], options)
    findings.facts["model"] = model_facts(models)
    trial = RecallTrial(models, questions(options.questions, options.seed), options.budgets, options.seed, options.only)
    answers: list[Answer] = []
    entrants = trial.entrants()
    stopped = gather(answers, timed(trial.answers(), Progress(entrants, trial.questions, 1)))
    if answers := answered_by_all(answers, len(entrants)):
        findings.scores = trial.measured(answers)
    if stopped:
        raise KeyboardInterrupt


def _memory(findings: Findings, options: Namespace) -> None:
    import torch

    from playground.bench.caches.freed_memory import MemoryRequest, measure_all
    from playground.bench.caches.policy_configs import points_at_budget

    requests = [
        MemoryRequest(point, options.shape or WEIGHED, options.tokens, options.written, torch.get_num_threads())
        for point in points_at_budget(options.kept, options.tokens, options.only)
    ]
    for result in counted(measure_all(requests), len(requests), lambda result: f"memory, {result.name}"):
        findings.memory_results.append(result)


def _step(findings: Findings, options: Namespace) -> None:
    from playground.bench.caches.policy_configs import points_at_budget
    from playground.bench.caches.policy_lane import random_model
    from playground.bench.caches.step_timing import WARM_UP, TimedLanes
    model = random_model(options.shape or PACED, options.behind + options.rounds + WARM_UP + 64)
    points = points_at_budget(options.kept, options.behind, options.only)
    findings.step_times = TimedLanes(model, options.behind, options.rounds).run(points, RemainingTime())


def _show(findings: Findings) -> None:
    print("\n\n".join(f"{title}\n{screen.table(rows)}" for title, _, rows in findings.tables()) + "\n")
    for line in (*findings.verdicts(), *findings.failures()):
        print(line)


def _write_page(path: Path, findings: Findings, options: Namespace) -> None:
    """Write the page, and its figure in a folder of the same name next to it.

    Of a page that exists, only the rows of the policies of --only are renewed.
    """
    folder = path.with_suffix("")
    picture = f"{folder.name}/score.svg"
    page = _renewed(path, findings, options, picture) if options.only and path.exists() else findings.page(picture)
    if findings.scores:
        folder.mkdir(exist_ok=True)
        write_text(str(folder / "score.svg"), findings.picture())
    write_text(str(path), page)


def _renewed(path: Path, findings: Findings, options: Namespace, picture: str) -> str:
    """The page with the scores that were measured now beside its others, which the findings get, too."""
    from playground.bench.caches.renewed_page import replaced, with_sections
    page = path.read_text(encoding="utf-8")
    findings.scores = replaced(page, findings.scores, options.only, options.questions)
    fact = f"scores of {', '.join(options.only)}", f"measured later, on {findings.facts['machine']['processor']}"
    return with_sections(page, findings.sections(picture), fact)
