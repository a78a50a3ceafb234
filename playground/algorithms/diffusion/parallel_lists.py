"""List tasks whose answers are known with their probabilities, to measure what filling positions together costs.

A task names an operation on a list of words. All its right answers are equally likely, and a word is one token, so the
marginals of an ideal denoiser, the dependence between positions and the chance of a right answer can be counted. After
the waiting line and the puzzles of ParallelBench, Kang et al. 2025, arXiv 2510.04767; words, wording and counting are
ours.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from math import ceil, log2, prod
from random import Random

from playground.algorithms.diffusion.parallel_texts import (
    NOUNS,
    PLACES,
    REWORDED,
    rewordings,
    sentences,
    solutions,
    sudoku,
)

NAMES = ("ann", "ben", "cleo", "dan", "eva", "fred", "gina", "hugo", "ida", "jack", "kim", "leo")
LENGTHS = (3, 4)  # of lists in the bundled table; squares have the first of them
EACH = 3  # lists of each length
WORDS = ("name", "noun", "place", "who", "verb", "whom")  # holes for one word
FIRST = {"items": ("cleo", "ann", "ben", "dan"), "name": "leo", "index": 1}  # in the first question of every task
Answer = tuple[str, ...]
Known = dict[int, str]
"""Words by position."""


@dataclass(frozen=True)
class ListTask:
    """A prompt with holes, and all right answers for what fills them."""

    ask: str  # with {items}, and {name} or {index} if the task needs them, or with holes of its own
    answers: Callable[..., Iterable[Answer]]
    draw: Callable[[Random], dict[str, str]] | None = None  # what fills holes of its own at random

    @property
    def pattern(self) -> re.Pattern:
        words = r"[a-z]+(?: [a-z]+)*"
        holes = {"items": words, "cells": words, "index": r"\d+"} | dict.fromkeys(WORDS, "[a-z]+")
        return re.compile(self.ask.format(**{name: f"(?P<{name}>{form})" for name, form in holes.items()}))


def _inserted(items: Answer, name: str, places: Iterable[int]) -> list[Answer]:
    return [(*items[:place], name, *items[place:]) for place in places]


def _removed(items: Answer, places: Iterable[int]) -> list[Answer]:
    return [items[:place] + items[place + 1:] for place in places]


def _replaced(items: Answer, name: str, places: Iterable[int]) -> list[Answer]:
    return [(*items[:place], name, *items[place + 1:]) for place in places]


def _squares(items: Answer) -> Iterator[Answer]:
    """Latin squares, row by row."""
    for rows in product(permutations(items), repeat=len(items)):
        if all(len(set(column)) == len(items) for column in zip(*rows)):
            yield tuple(word for row in rows for word in row)


TASKS: dict[str, ListTask] = {
    "copy": ListTask("copy {items}:", lambda items: [items]),
    "reverse": ListTask("reverse {items}:", lambda items: [items[::-1]]),
    "sort": ListTask("sort {items}:", lambda items: [tuple(sorted(items))]),
    "shuffle": ListTask("shuffle {items}:", permutations),
    "insert at": ListTask("put {name} at {index} into {items}:", lambda items, name, index: _inserted(
        items, name, [index])),
    "insert anywhere": ListTask("put {name} into {items}:", lambda items, name: _inserted(
        items, name, range(len(items) + 1))),
    "remove at": ListTask("take number {index} out of {items}:", lambda items, index: _removed(items, [index])),
    "remove any": ListTask("take one out of {items}:", lambda items: _removed(items, range(len(items)))),
    "replace at": ListTask("change number {index} of {items} to {name}:", lambda items, name, index: _replaced(
        items, name, [index])),
    "replace any": ListTask("change one of {items} to {name}:", lambda items, name: _replaced(
        items, name, range(len(items)))),
    "latin square": ListTask("square of {items}:", _squares),
}


def _drawn_sentence(chance: Random) -> dict[str, str]:
    return {"noun": chance.choice(list(NOUNS)), "place": chance.choice(PLACES)}


def _drawn_rewording(chance: Random) -> dict[str, str]:
    who, whom = chance.sample(NAMES, 2)
    return {"who": who, "verb": chance.choice(list(REWORDED)), "whom": whom}


TEXTS: dict[str, ListTask] = {
    "sudoku": ListTask("sudoku {cells}:", lambda cells: solutions(cells.split()),
                       lambda chance: {"cells": " ".join(sudoku(chance, NAMES))}),
    "sentence": ListTask("sentence with {noun} and {place}:", sentences, _drawn_sentence),
    "reword": ListTask("reword {who} {verb} {whom}:", rewordings, _drawn_rewording),
}


@dataclass(frozen=True)
class ListQuestion:
    """A prompt, the list in it if there is one, and all right answers, which are equally likely.

    An index counts from 0.
    """

    task: str
    prompt: str
    items: Answer
    answers: tuple[Answer, ...]

    def score(self, words: Sequence[str], unchanged: bool = False) -> float:
        """1 for a right answer. A shuffled list must differ from the given one unless `unchanged` is right too."""
        words = tuple(words)
        return float(words in self.answers and (unchanged or self.task != "shuffle" or words != self.items))


def question(prompt: str) -> ListQuestion | None:
    """The question that a prompt asks; None for any other prompt, and for a list with a repeated word."""
    text = " ".join(prompt.lower().split())
    for name, task in TASKS.items():
        if found := task.pattern.fullmatch(text):
            asked = found.groupdict()
            items = tuple(asked.pop("items").split())
            if "index" in asked:
                asked["index"] = int(asked["index"])
            if len(set(items)) == len(items) and asked.get("index", 0) < len(items):
                return ListQuestion(name, text, items, tuple(task.answers(items, **asked)))
    for name, task in TEXTS.items():
        found = task.pattern.fullmatch(text)
        if found and (right := tuple(task.answers(**found.groupdict()))):
            return ListQuestion(name, text, (), right)
    return None


def ask(task: str, length: int, chance: Random) -> ListQuestion:
    """A random question of a task; `length` counts the words of its list."""
    if task in TEXTS:
        return question(TEXTS[task].ask.format(**TEXTS[task].draw(chance)))
    *items, name = chance.sample(NAMES, length + 1)
    asked = TASKS[task].ask.format(items=" ".join(items), name=name, index=chance.randrange(length))
    return question(asked)


def questions(seed: int = 0) -> list[ListQuestion]:
    """The questions of the bundled table: some lists of each length for every task."""
    chance, found = Random(seed), []
    for task in TASKS:
        for length in LENGTHS[:1] if task == "latin square" else LENGTHS:
            first = TASKS[task].ask.format(**FIRST | {"items": " ".join(FIRST["items"][:length])})
            found += [question(first), *(ask(task, length, chance) for _ in range(EACH - 1))]
    return list({one.prompt: one for one in found}.values())


def text_questions(seed: int = 0) -> list[ListQuestion]:
    """The questions of the bundled table of puzzles and sentences."""
    chance = Random(seed)
    found = [ask(task, 0, chance) for task in TEXTS for _ in range(EACH)]
    return list({one.prompt: one for one in found}.values())


def texts(asked: Iterable[ListQuestion]) -> list[str]:
    """Every prompt with every right answer."""
    return [f"{one.prompt} {' '.join(answer)}" for one in asked for answer in one.answers]


# --- what filling together costs ---

def consistent(answers: Sequence[Answer], known: Known) -> list[Answer]:
    """Answers that have these words; positions behind the end hold empty words."""
    return [answer for answer in answers if all(_word(answer, i) == word for i, word in known.items())]


def marginals(answers: Sequence[Answer], position: int) -> dict[str, float]:
    """Probability of each word at a position."""
    counts = Counter(_word(answer, position) for answer in answers)
    return {word: count / len(answers) for word, count in counts.items()}


def total_correlation(answers: Sequence[Answer], positions: Sequence[int], known: Known) -> float | None:
    """Bits by which words at these positions depend on each other, given the known ones: the divergence of words that
    are drawn independently from the joint law. None if no answer has the known words.
    """
    left = consistent(answers, known)
    if not left:
        return None
    joint = Counter(tuple(_word(answer, i) for i in positions) for answer in left)
    return sum(_bits(marginals(left, i).values()) for i in positions) - _bits(n / len(left) for n in joint.values())


def chance_of_right(answers: Sequence[Answer], schedule: Sequence[Sequence[int]]) -> float:
    """Probability that an ideal denoiser writes a right answer at temperature 1, if the positions of each step are
    drawn independently from their marginals given the steps before.
    """
    return sum(_probability(answers, answer, schedule) for answer in set(answers))


def _probability(answers: Sequence[Answer], answer: Answer, schedule: Sequence[Sequence[int]]) -> float:
    known, found = {}, 1.0
    for positions in schedule:
        left = consistent(answers, known)
        found *= prod(marginals(left, i)[_word(answer, i)] for i in positions)
        known |= {i: _word(answer, i) for i in positions}
    return found


def steps_of(length: int, together: int) -> list[range]:
    """Positions from left to right, in as few steps as so many in each allow; they are shared evenly, as a decoder with
    that number of steps does.
    """
    steps = ceil(length / together)
    base, extra = divmod(length, steps)
    starts = [step * base + min(step, extra) for step in range(steps + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _word(answer: Answer, position: int) -> str:
    return answer[position] if position < len(answer) else ""


def _bits(probabilities: Iterable[float]) -> float:
    return -sum(p * log2(p) for p in probabilities if p > 0)
