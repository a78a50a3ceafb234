"""`bench effects`: the effects that the bundled models show, recorded with rules, numbers and charts."""
from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.bench.effects import EFFECTS
from playground.bench.effects.effect import Effect, EffectResult, document, page
from playground.bench.report_text import report_json
from playground.bench.survey.survey import Progress
from playground.cli.bench.survey import gather, load_for, model_facts, timed
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import show_progress
from playground.cli.shared_options import CommandParser, add_count, add_models, add_names, add_results, add_threads
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.decoding.models import Models

FIGURES = "effects.json"
PAGE = "docs/effects.md"


def record_options(command: CommandParser) -> None:
    add_names(command, "only", "some of the effects; default: all", default=None)
    add_count(command, "questions", 2, None, "of each kind, instead of the effect's own number, for a quick check")
    add_count(command, "repeats", 1, 3, "measured rounds, if times are compared")
    add_count(command, "seed", 0, 1)
    add_models(command)
    add_threads(command)
    add_results(command, FIGURES, PAGE, "write a page, and its charts next to it")


def record(options: Namespace) -> bool:
    """Measure each effect, print whether it is shown, and write the requested files. After Ctrl-C, those that were
    measured to their end are written.
    """
    effects = _effects(options)
    for path in (options.out, options.page):
        check_place(path)
    models = load_for([entrant for effect in effects for entrant in effect.entrants], options)
    from playground.bench.speed.speed_report import machine  # late, since it imports torch
    findings: list[EffectResult] = []
    stopped = gather(findings, _findings(effects, models, options))
    settings = model_facts(models) | {"seed": options.seed, "repeats": options.repeats}
    settings |= {"stopped": f"with Ctrl-C after {len(findings)} of {len(effects)} effects"} if stopped else {}
    facts = {"settings": settings, "machine": machine(models.target.device)}
    write_text(options.out, report_json(document(facts, findings)))
    if options.page is not None:
        _write_page(Path(options.page), facts, findings)
    return stopped


def _effects(options: Namespace) -> list[Effect]:
    names = list(dict.fromkeys(options.only or EFFECTS))
    if unknown := next((name for name in names if name not in EFFECTS), None):
        raise Refusal(f"There is no effect {unknown!r}; choose one of {', '.join(EFFECTS)}.", "only")
    size = {} if options.questions is None else {"count": options.questions}
    return [EFFECTS[name](seed=options.seed, **size) for name in names]


def _findings(effects: list[Effect], models: Models, options: Namespace) -> Iterator[EffectResult]:
    """Each effect once it is measured, after it is printed."""
    for effect in effects:
        progress = Progress(effect.entrants, effect.questions, options.repeats if effect.timed else 1)
        found = EffectResult.of(effect, list(timed(effect.observe(models, options.repeats, options.seed), progress)))
        show_progress(1.0, "")
        print("\n  ".join(found.lines()), flush=True)
        yield found


def _write_page(path: Path, facts: dict[str, Any], findings: list[EffectResult]) -> None:
    """Write the page, and the charts in a folder of the same name next to it."""
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    for finding in findings:
        write_text(str(folder / f"{finding.effect.name}.svg"), finding.effect.draw(finding.answers).svg())
    write_text(str(path), page(facts, findings, folder.name))
