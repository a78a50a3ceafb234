"""Finished lanes held against one of them: what each came to, and where its text leaves that one's. Imports neither
torch nor gradio.
"""
from __future__ import annotations

from typing import Any

from playground.trace.result import Result


def yardstick_of(results: list[Result]) -> int:
    """The lane that others are held against where nobody chose one: plain greedy decoding where it ran, otherwise the
    first that did.
    """
    begun = [i for i, result in enumerate(results) if result.begun]
    return next((i for i in begun if results[i].strategy == "greedy"), begun[0] if begun else 0)


def compared(results: list[Result], yardstick: int) -> list[dict[str, Any]]:
    """Each lane as plain data (`Result.to_json`) with the strategy it is held `against`, whether it wrote the
    `same_text`, and else the first `difference`: index of the token, margin in logits, a sentence. Both None where one
    of the two wrote nothing."""
    other = results[yardstick]
    return [{**result.to_json(), "against": other.strategy, **_relation(result, other)} for result in results]


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
