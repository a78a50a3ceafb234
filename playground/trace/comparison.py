"""Compares finished lanes with one of them: the result of each, and the first token in which its text differs.

Imports neither torch nor gradio.
"""
from __future__ import annotations

from typing import Any

from playground.trace.result import Result


def baseline_of(results: list[Result]) -> int:
    """Index of the default lane to compare with: greedy decoding if it ran, otherwise the first lane that ran."""
    begun = [i for i, result in enumerate(results) if result.begun]
    return next((i for i in begun if results[i].strategy == "greedy"), begun[0] if begun else 0)


def compared(results: list[Result], baseline: int) -> list[dict[str, Any]]:
    """Each lane as plain data (`Result.to_dict`) with its comparison with lane `baseline`.

    `against` is the strategy of that lane, `same_text` whether the texts are equal, and `difference` the first
    difference if they are not: index of the token, margin in logits, a sentence. Both are None if either lane could not
    start.
    """
    other = results[baseline]
    return [{**result.to_dict(), "against": other.strategy, **_relation(result, other)} for result in results]


def _relation(result: Result, other: Result) -> dict[str, Any]:
    if not (result.begun and other.begun):
        return {"same_text": None, "difference": None}
    difference = result.difference(other)
    if difference is None:
        return {"same_text": True, "difference": None}
    return {
        "same_text": False,
        "difference": {"token": difference.index, "margin": difference.margin, "sentence": difference.sentence()},
    }
