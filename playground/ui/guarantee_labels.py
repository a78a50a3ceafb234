"""What guarantees are called on the pages, each with a sentence."""
from __future__ import annotations

from collections.abc import Iterable

PROMISES = {
    "greedy_identical": ("lossless", "Token for token the text of plain greedy decoding under the same toggles."),
    "distribution_identical": (
        "lossless",
        "Draws from exactly the distribution of plain sampling under the same toggles.",
    ),
    "constraint_sound": ("always valid", "Every finished text satisfies the constraint."),
    "budget_respected": ("within budget", "The cache never holds more than its budget after a token is kept."),
    "heuristic": ("heuristic", "No guarantee: what it gives up is what there is to see."),
}
"""The guarantees worth a badge on a lane."""
LIMIT = {
    "collapses": (
        "plain limit",
        "At the settings its description names it writes what a simpler method writes; the tests hold it to that.",
    )
}
"""Of use to tests and in the library, and no badge."""


def told(guarantees: Iterable[str]) -> dict[str, str]:
    """Label and sentences of these guarantees; two that share a label share an entry."""
    found: dict[str, str] = {}
    for label, sentence in (known for name in guarantees if (known := (PROMISES | LIMIT).get(name))):
        found[label] = f"{found[label]} {sentence}" if label in found else sentence
    return found
