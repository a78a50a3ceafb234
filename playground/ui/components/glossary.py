"""The glossary: terms on the page with their definitions, shown on hover, on focus and on tap.

Any element may carry `data-term="residual"`, or an empty `data-term` if its own text is the term; the labels of the
page (LABELS in scripts/components/glossary.js) need no attribute. The terms are in assets/glossary.json, as {"term",
"also": other forms, "text"}; numbers with a definition of their own (docs/numbers.md) show that one.
"""
from __future__ import annotations

import json
from functools import cache
from html import escape
from typing import Any

from playground.asset_files import ASSETS


@cache
def terms() -> list[dict[str, Any]]:
    """All entries, by term."""
    return json.loads((ASSETS / "glossary.json").read_text(encoding="utf-8"))


def definition(text: str) -> str:
    """The definition of a term in any of its forms; empty if there is none."""
    wanted = " ".join(text.lower().split())
    return next((entry["text"] for entry in terms() if wanted in forms(entry)), "")


def forms(entry: dict[str, Any]) -> list[str]:
    return [form.lower() for form in (entry["term"], *entry["also"])]


def section() -> str:
    """The whole glossary as HTML."""
    rows = "".join(f"<div><dt>{escape(entry['term'])}</dt><dd>{escape(entry['text'])}</dd></div>" for entry in terms())
    return (f"<section class='glossary' id='glossary' tabindex='-1' aria-labelledby='glossary-title'>"
            f"<h3 id='glossary-title'>Glossary</h3><dl>{rows}</dl></section>")
