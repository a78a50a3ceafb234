"""Similarity measures of two texts, 0 to 1. Each is symmetric, and 1 for equal texts."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from playground.algorithms.search.final_answer import final_answer, whole_text

LONGEST = 6  # characters of the longest n-grams of chrF, as its authors set it


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.casefold())


def f1(left: Counter, right: Counter) -> float:
    """F1 of two bags: twice the size of their intersection over the sum of their sizes."""
    total = left.total() + right.total()
    return 2 * (left & right).total() / total if total else 1.0


def word_f1(left: str, right: str) -> float:
    """F1 of the bags of words."""
    return f1(Counter(words(left)), Counter(words(right)))


def chrf(left: str, right: str) -> float:
    """chrF with beta 1: F1 of character n-grams without spaces, averaged over n up to 6 or the longer text's length."""
    left, right = "".join(left.split()), "".join(right.split())
    orders = range(1, min(LONGEST, max(len(left), len(right))) + 1)
    found = [f1(grams(left, n), grams(right, n)) for n in orders]
    return sum(found) / len(found) if found else 1.0


def grams(text: str, n: int) -> Counter:
    return Counter(text[i:i + n] for i in range(len(text) - n + 1))


def edits(left: str, right: str) -> float:
    """1 minus the word edit distance over the number of words of the longer text."""
    a, b = words(left), words(right)
    return 1 - edit_distance(a, b) / max(len(a), len(b)) if a or b else 1.0


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Levenshtein distance of two sequences."""
    distances = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, distances = distances, [i]
        for j, y in enumerate(b, 1):
            distances.append(min(before[j] + 1, distances[-1] + 1, before[j - 1] + (x != y)))
    return distances[-1]


def same_text(left: str, right: str) -> float:
    """1 if the texts are equal up to whitespace."""
    return float(whole_text(left) == whole_text(right))


def same_number(left: str, right: str) -> float:
    """1 if the final answers are equal; a text without one is similar only to itself."""
    number = final_answer(left)
    return float(left == right if number is None else number == final_answer(right))


MEASURES: dict[str, Callable[[str, str], float]] = {
    "words": word_f1, "letters": chrf, "edits": edits, "number": same_number, "text": same_text}
