"""Extraction of the final answer of a text, normalised so that equal answers are equal strings."""
from __future__ import annotations

import re
from decimal import Decimal

NUMBER = re.compile(r"(?:(?<![\w)])[-+])?\d[\d,]*(?:\.\d+)?")
STATED = re.compile(r"\\boxed\{([^{}]*)\}|(?:\banswer is|\banswer:|####)([^\n]*)", re.IGNORECASE)


def last_number(text: str) -> str | None:
    """The last number stated as the answer, as in "the answer is 3", "#### 3" or "\\boxed{3}"; else the last number."""
    stated = [number[0] for boxed, said in STATED.findall(text) if (number := NUMBER.search(boxed or said))]
    found = stated or NUMBER.findall(text)
    return _plain(found[-1]) if found else None


def last_words(text: str, count: int) -> str | None:
    """The last `count` words, without case and punctuation."""
    return " ".join(re.findall(r"\w+", text.casefold())[-count:]) or None


def whole_text(text: str) -> str | None:
    """The whole text with whitespace normalised."""
    return " ".join(text.split()) or None


def _plain(number: str) -> str:
    """ "1,200.50" as "1200.5"."""
    return f"{Decimal(number.replace(',', '')).normalize() + 0:f}"
