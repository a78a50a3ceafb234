"""`bench survey`: strategies on questions."""
from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

from playground.bench.report_text import failure_lines, report_json
from playground.bench.survey.results import sections, table
from playground.bench.survey.survey import Answer, Entrant, Progress, survey
from playground.bench.survey.survey_export import as_csv, document, model_facts, page
from playground.cli import terminal_view as screen
from playground.cli.input_files import check_place, write_text
from playground.cli.lane_options import read_lane
from playground.cli.load_models import load, show_progress
from playground.cli.remaining_time import RemainingTime
from playground.cli.shared_options import (
    HELD_OUT,
    CommandParser,
    add_count,
    add_models,
    add_names,
    add_out,
    add_threads,
)
from playground.errors import Refusal
from playground.questions.questions import Question, ask
from playground.questions.user_questions import how_judged, read_questions

if TYPE_CHECKING:
    from playground.decoding.models import Models


def measure_options(command: CommandParser) -> None:
    command.add_argument(
        "--with", nargs="+", action="extend", required=True, dest="entrants", metavar="NAME[:KNOB=VALUE,...][+NAME...]",
        help="a lane: greedy, sample:temperature=0.7, speculative+prompt_lookup:depth=10+greedy_match; the others are "
        "compared with the first. A knob may take an input of each question: gencls_ppl:labels={labels}",
    )
    add_names(command, "tasks", "of the small world: records, arithmetic, ...", "TASK")
    add_count(command, "questions", 1, 12, HELD_OUT)
    add_count(command, "grade", 1, None, "difficulty of the questions; default: mixed")
    command.add_argument("--file", metavar="F.jsonl",
                         help='questions of your own, one {"prompt": ..., "answer": ...} per line')
    add_count(command, "repeats", 1, 1, "measured rounds")
    add_models(command)
    add_threads(command)
    add_count(command, "seed", 0, 0)
    add_count(command, "max-new-tokens", 1, 330)
    add_out(command, "survey.json")
    command.add_argument("--csv", nargs="?", const="survey.csv", metavar="F.csv",
                         help="write a line per answer, survey.csv")
    command.add_argument("--page", nargs="?", const="survey.md", metavar="F.md",
                         help="write the tables as a page, survey.md")


def measure(options: Namespace) -> bool:
    """Ask, print the tables, and write the requested files. After Ctrl-C, partial results are shown and written."""
    entrants, questions = read_entrants(options.entrants), _questions(options)
    for path in (options.out, options.csv, options.page):
        check_place(path)
    models = load_for(entrants, options)
    from playground.bench.speed.speed_report import machine  # late, since it imports torch
    from playground.decoding.limits import Limits
    answers: list[Answer] = []
    limits = Limits(options.seed, options.max_new_tokens)
    given = survey(models, entrants, questions, options.repeats, limits)
    stopped = gather(answers, timed(given, Progress(entrants, questions, options.repeats)))
    facts = {"settings": _settings(options, models, questions), "machine": machine(models.target.device)}
    print(
        "\n\n".join(
            "\n".join([section.task, *section.remarks, screen.table(section.rows)])
            for section in sections(table(answers))
        )
    )
    failures = failure_lines((answer.entrant, answer.failure) for answer in answers)
    for line in filter(None, (how_judged(questions), *failures)):
        print(line)
    write_text(options.out, report_json(document(facts, entrants, questions, answers)))
    write_text(options.csv, as_csv(answers))
    write_text(options.page, page("Survey", facts, answers))
    return stopped


def read_entrants(lanes: list[str]) -> list[Entrant]:
    """Lanes, named as they are written. Raises Refusal for one that could never run, before a model is loaded."""
    entrants = [Entrant(text, read_lane(text)) for text in lanes]
    for entrant in entrants:
        entrant.assembly()
    return entrants


def load_for(entrants: Iterable[Entrant], options: Namespace) -> Models:
    """The models that the lanes need, with the requested number of threads."""
    import torch
    if options.threads:
        torch.set_num_threads(options.threads)
    return load(options, draft=any("draft" in entrant.assembly().needs() for entrant in entrants))


def gather(into: list[Any], results: Iterator[Any]) -> bool:
    """Collect answers or other results as they are finished; returns True if Ctrl-C stopped it after some of them."""
    try:
        into.extend(results)
    except KeyboardInterrupt:
        check_some(into)
        return True
    finally:
        show_progress(1.0, "")
    return False


def check_some(results: Sized) -> None:
    """After Ctrl-C, end the command if there is nothing to show."""
    if not results:
        raise KeyboardInterrupt("stopped; there is nothing to show yet: run again to begin anew") from None


def timed(answers: Iterator[Answer], progress: Progress) -> Iterator[Answer]:
    """Pass the answers on, showing progress and the estimated time left."""
    remaining = RemainingTime()
    remaining(0.0, "warming up")
    for answer in answers:
        progress.count(answer)
        remaining(progress.share, answer.entrant, progress.left)
        yield answer


def _questions(options: Namespace) -> list[Question]:
    """Questions of the tasks, interleaved, then those of the file; raises Refusal."""
    if not options.tasks and not options.file:
        raise Refusal(
            "There is no question to ask: name --tasks, such as records arithmetic, or a --file of your own.", "tasks"
        )
    drawn = [ask(task, options.questions, options.seed, options.grade) for task in dict.fromkeys(options.tasks)]
    return [question for row in zip(*drawn) for question in row] + (
        read_questions(options.file) if options.file else []
    )


def _settings(options: Namespace, models: Models, questions: list[Question]) -> dict[str, Any]:
    judged = how_judged(questions)
    return {
        **model_facts(models),
        "repeats": options.repeats,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        **({"judged": judged} if judged else {}),
    }
