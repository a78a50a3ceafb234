"""The table of model types, as data and as a page. Imports neither torch nor transformers."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from playground.bench.models import form_rows, stored_rows
from playground.bench.report_text import Rows, markdown, markdown_page, section

if TYPE_CHECKING:
    from playground.bench.models.trial import Finding

FORMAT, VERSION = "decoding-playground-models", 1
WORKING = ("type", "plain decoding, samplers, constraints, search", "draft trees", "cache policies, attention weights")
COMMAND = "python -m playground bench models --out --page"
INTRODUCTION = (
    "# Models",
    "Every causal type of the transformers library, as a tiny random network built from its config class. Types "
    "that work wrote the text of the library's own `generate`, past every window and chunk of their config: with "
    "plain greedy decoding, with speculation over draft trees, and with a cache policy whose budget the text does"
    " not exceed. When any model is loaded, several forwards and a draft tree are compared with the library's own"
    " forward; a model that would differ is refused with a sentence. Written by `" + COMMAND + "`.",
)
WORKS_NOTE = (
    "Samplers, constraints and searches act on logits, so they work wherever plain decoding does. *Branch by branch*: "
    "the library's own attention runs, which the playground can neither read nor mask. A draft tree then takes one "
    "forward for each branch, and cache policies that evict are refused."
)


def document(library: str, findings: Iterable[Finding]) -> dict[str, Any]:
    """Plain data for JSON; `library` is the version of transformers."""
    types = [{name: value for name, value in asdict(finding).items() if value} for finding in findings]
    return {"format": FORMAT, "version": VERSION, "transformers": library, "types": types}


def counts(findings: Iterable[Finding]) -> Rows:
    """How many types there are of each outcome, header first."""
    found = Counter(finding.outcome for finding in findings)
    return [list(found), [str(count) for count in found.values()]]


def page(library: str, findings: list[Finding]) -> str:
    """The page docs/models.md."""
    working = [finding for finding in findings if finding.outcome == "works"]
    others = [finding for finding in findings if finding.outcome != "works"]
    return markdown_page(
        *INTRODUCTION,
        f"{len(findings)} types of transformers {library}:",
        markdown(counts(findings)),
        section("Types that work", [list(WORKING), *map(_support, working)], WORKS_NOTE),
        form_rows.MINIMAX,
        section("Other types", [["type", "outcome", "reason"], *map(_reason, others)]),
        section("Stored forms", stored_rows.ROWS, stored_rows.NOTE),
        stored_rows.UNUSED,
        section("What people have on disk", form_rows.ROWS, form_rows.NOTE),
        form_rows.SWEEP,
    )


def _support(finding: Finding) -> list[str]:
    trees = "in one forward" if finding.attention == "playground" else "branch by branch"
    return [
        f"`{finding.model_type}`",
        "yes" if "plain" in finding.supports else "no",
        trees if "trees" in finding.supports else "no",
        "yes" if "policies" in finding.supports else "no",
    ]


def _reason(finding: Finding) -> list[str]:
    return [f"`{finding.model_type}`", finding.outcome, finding.reason]
