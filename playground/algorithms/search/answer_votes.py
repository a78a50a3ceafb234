"""Votes of several texts: the answer that each gives, and the answer that wins."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from playground.algorithms.search.final_answer import final_answer, last_words, whole_text
from playground.algorithms.search.parallel_samples import SampledText
from playground.contract import knob

Text = TypeVar("Text", bound=SampledText)
Votes = dict[str, list[Text]]
"""Texts by the answer that they give, answers in the order of their first text."""


def answer_knob() -> str:
    """What the answer of a text is; `words` counts for one of the choices."""
    return knob(
        "number",
        choices=("number", "words", "text"),
        help="the answer of a text: the one it states, or its last number; its last words; or the whole text",
    )


def words_knob() -> int:
    return knob(2, 1, 20, step=1, help="number of last words that make up the answer")


def answer_in(text: str, kind: str, words: int) -> str | None:
    """The answer of a text, of a kind that `answer_knob` offers; None if it gives none."""
    if kind == "words":
        return last_words(text, words)
    return {"number": final_answer, "text": whole_text}[kind](text)


def by_answer(texts: Iterable[Text], read: Callable[[str], str | None]) -> Votes[Text]:
    """The votes of texts whose answers `read` gives; one without an answer does not vote."""
    votes: Votes[Text] = defaultdict(list)
    for text in texts:
        if (answer := read(text.leaf.text)) is not None:
            votes[answer].append(text)
    return votes


def elected(votes: Mapping[str, list[Text]], weight: Callable[[list[Text]], float]) -> str:
    """The answer with the largest weight; of equal ones that with the larger sum of log-probabilities, then the first.
    """
    return max(votes, key=lambda answer: (weight(votes[answer]), sum(text.logp for text in votes[answer])))
