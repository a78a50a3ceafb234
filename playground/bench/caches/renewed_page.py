"""Scores of some policies, measured anew, in a page that an earlier run wrote."""
from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from playground.bench.caches.caches_defaults import TASKS
from playground.bench.caches.policy_configs import FULL
from playground.bench.caches.recall_score import Measured, rows
from playground.bench.report_text import markdown
from playground.bench.survey.results import Score
from playground.errors import Refusal

HEADER = markdown(rows([]))
SECTION = re.compile(r"^## (.+)\n(?:(?!## ).*\n)*", re.MULTILINE)


def measured_in(page: str, number: int) -> list[Measured]:
    """The scores in the table of a page, over `number` questions, to the digits that are shown.

    Raises Refusal if the page has no such table.
    """
    if HEADER not in page:
        raise Refusal("The page has no table of scores: measure all policies, without --only.", "page")
    table = page.partition(HEADER)[2].partition("\n\n")[0].strip().splitlines()
    entrants = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [_measured(name, task, cells[2 * place:2 * place + 2], number)
            for place, task in enumerate(TASKS) for name, *cells in entrants]


def _measured(name: str, task: str, cells: Sequence[str], number: int) -> Measured:
    share, shown = float(cells[0].rstrip("%")) / 100, cells[1]
    score, failure = (None, shown) if shown == "failed" else (_score(shown, number), "")
    return Measured(task, name, name.split(",")[0], share, score, failure)


def _score(shown: str, number: int) -> Score | None:
    if shown == "-":
        return None
    mean, _, error = shown.partition(" ± ")
    return Score(float(mean), float(error) if error else None, number)


def replaced(page: str, anew: Iterable[Measured], names: Collection[str], number: int) -> list[Measured]:
    """The scores of a page, in which those of the policies of these names are the new ones.

    These are rounded like the others, so that equal scores share a place.
    """
    own = [each for each in measured_in(markdown(rows(anew)), number) if each.series in names]
    others = [each for each in measured_in(page, number) if each.series not in names]
    return sorted([*others, *own], key=lambda each: (TASKS.index(each.task), each.series != FULL, each.series))


def with_sections(page: str, sections: dict[str, str], fact: tuple[str, str]) -> str:
    """The page with these sections, by title, in place of its own; those it does not have are left out.

    A fact becomes the last one of its settings and machine, in place of one of the same name.
    """
    own, below = page.split("\n\n## ", 1)
    name, value = fact
    facts = [line for line in own.splitlines() if not line.startswith(f"| {name} |")]
    page = "\n".join([*facts, f"| {name} | {value} |", "", f"## {below}"])
    renewed = SECTION.sub(lambda found: f"{sections[found[1]]}\n\n" if found[1] in sections else found[0], page)
    return renewed.strip() + "\n"


def check_settings(page: str, settings: dict[str, object]) -> None:
    """Raise Refusal if the page was measured with other budgets or questions."""
    for name in ("budgets", "questions", "seed"):
        if f"| {name} | {settings[name]} |" not in page:
            raise Refusal(f"The page was measured with other {name} than {settings[name]}: give its own.", name)
