"""How alike two texts are, 0 to 1, by several measures. Each is symmetric, and 1 for a text and itself."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from playground.algorithms.search.final_answer import last_number, whole_text

LONGEST = 6  # letters of the n-grams of chrF, as its authors set it


def words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.casefold())


def f1(left: Counter, right: Counter) -> float:
    """Harmonic mean of precision and recall of two bags: twice what they share over all they hold."""
    held = left.total() + right.total()
    return 2 * (left & right).total() / held if held else 1.0


def word_f1(left: str, right: str) -> float:
    """F1 of the words, whatever their order."""
    return f1(Counter(words(left)), Counter(words(right)))


def chrf(left: str, right: str) -> float:
    """F1 of letter n-grams, on average over the lengths up to six that one of them has; spaces do not count. chrF with
    beta 1.
    """
    left, right = "".join(left.split()), "".join(right.split())
    orders = range(1, min(LONGEST, max(len(left), len(right))) + 1)
    found = [f1(grams(left, n), grams(right, n)) for n in orders]
    return sum(found) / len(found) if found else 1.0


def grams(text: str, n: int) -> Counter:
    return Counter(text[i:i + n] for i in range(len(text) - n + 1))


def edits(left: str, right: str) -> float:
    """1 less the words to insert, delete or replace over those of the longer text."""
    a, b = words(left), words(right)
    return 1 - edit_distance(a, b) / max(len(a), len(b)) if a or b else 1.0


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Insertions, deletions and replacements that turn one sequence into the other, at least."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
    return row[-1]


def same_text(left: str, right: str) -> float:
    """1 where the texts say the same but for spaces."""
    return float(whole_text(left) == whole_text(right))


def same_number(left: str, right: str) -> float:
    """1 where the last numbers are equal; a text without a number is like itself alone."""
    number = last_number(left)
    return float(left == right if number is None else number == last_number(right))


MEASURES: dict[str, Callable[[str, str], float]] = {
    "words": word_f1, "letters": chrf, "edits": edits, "number": same_number, "text": same_text}
