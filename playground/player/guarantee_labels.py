"""The labels of guarantees on the pages, each with a sentence of explanation."""
from __future__ import annotations

from collections.abc import Iterable

PROMISES = {
    "greedy_identical": (
        "same text as greedy",
        "Lossless: token for token the text of plain greedy decoding with the same processors and toggles.",
    ),
    "distribution_identical": (
        "same distribution as sampling",
        "Lossless: samples from exactly the output distribution of plain sampling with the same processors and "
        "toggles.",
    ),
    "constraint_sound": ("always valid", "Every finished text satisfies the constraint."),
    "budget_respected": ("within budget", "After each committed token the KV cache holds at most its budget."),
    "heuristic": ("heuristic", "No guarantee: the text may differ from plain decoding."),
}
"""The guarantees worth a badge on a lane."""
LIMIT = {
    "collapses": (
        "plain limit",
        "With the settings named in its description it equals a simpler method; the tests check this.",
    ),
    "reads_only": (
        "reads only", "An overlay: text, probabilities and KV cache are to the bit those of the lane without it.",
    ),
}
"""Shown in the library only, without a badge on lanes."""


def labelled(guarantees: Iterable[str]) -> dict[str, str]:
    """{label: sentences} of these guarantees; the sentences of guarantees with the same label are joined."""
    found: dict[str, str] = {}
    for label, sentence in (known for name in guarantees if (known := (PROMISES | LIMIT).get(name))):
        found[label] = f"{found[label]} {sentence}" if label in found else sentence
    return found
