"""ParallelBench: what it costs to fill positions together that depend on each other."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from playground.algorithms.diffusion.parallel_lists import (
    ListQuestion,
    chance_of_right,
    question,
    steps_of,
    total_correlation,
)
from playground.contract import Study, knob
from playground.errors import Refusal
from playground.events import Figure, Note


@dataclass(frozen=True)
class CanvasRun:
    """A lane that answered a question: words filled in each forward by position, its text, and its number of forwards.
    """

    label: str
    strategy: str
    asked: ListQuestion
    steps: tuple[dict[int, str], ...]
    words: tuple[str, ...]
    forwards: int

    @property
    def exact(self) -> bool:
        """Whether each position holds one word, as the counting assumes."""
        filled = [word for step in self.steps for word in step.values() if word]
        return sorted(filled) == sorted(self.words)

    @property
    def together(self) -> float:
        """Words per forward."""
        return len(self.words) / max(1, self.forwards)


class ParallelBench(Study):
    """Score canvases that answered list questions, by the number of words they filled per forward, against an ideal
    denoiser. Long texts and summaries, which the benchmark lets large models judge, are left out.

    Words that are filled in one forward are chosen independently. The bits by which they depend on each other, their
    total correlation given what was filled before, are what an ideal denoiser loses: if they are b on average, it
    writes a right answer at temperature 1 with probability 2 to the minus b at least. Copying has none, shuffling n
    words at once is right in n! of n to the n cases, and one word replaced anywhere with (1 - 1/n) to the n - 1.

    Make runs with the model oracle-lists or oracle-puzzles, whose table is that denoiser, or with any other that fills
    masks; the counting needs one token per word. The puzzles are sudokus of 4 x 4 words with one solution, sentences
    whose words agree, and paraphrases, of which a small grammar lists every right one in place of the benchmark's
    grammar checker. After ParallelBench, Kang et
    al. 2025, arXiv 2510.04767; its bounds are ours.
    """

    name, title, paper, sheet = "parallelbench", "ParallelBench", "2510.04767", "diffusion/parallelbench"
    guarantee, reconstruction, sure = ("heuristic",), True, "medium"

    unchanged: bool = knob(False, help="shuffle: the list in its given order counts as shuffled, as in the formula")

    def draw(self, traces) -> list[Figure | Note]:
        runs = [run for number, trace in enumerate(traces, 1) if (run := read(number, trace))]
        if not runs:
            raise Refusal(
                "None of these lanes filled a canvas for a list question: record one with the model oracle-lists, for "
                "example on the prompt 'shuffle cleo ann ben:'.",
                "traces",
            )
        return [self._table(runs), *self._dependence(runs), *self._curves(runs), *map(self._said, runs)]

    def _table(self, runs: list[CanvasRun]) -> Figure:
        return Figure("matrix", "canvases", {
            "rows": [run.label for run in runs],
            "columns": ["words per forward", "score", "bits filled together", "chance of an ideal denoiser"],
            "values": [[run.together, self._score(run), *_counted(run)] for run in runs],
        })

    def _dependence(self, runs: list[CanvasRun]) -> list[Figure]:
        """Bits by which the words of each forward depended on each other."""
        return [
            Figure("scalar", "bits by which words filled together depend on each other",
                   {"x": number, "axis": "forward", "series": {run.label: bits}})
            for run in runs for number, bits in enumerate(_bits(run), 1) if bits is not None
        ]

    def _curves(self, runs: list[CanvasRun]) -> list[Figure]:
        """Mean score by rounded words per forward, beside an ideal denoiser that fills from left to right."""
        groups = defaultdict(list)
        for run in runs:
            groups[run.asked.task, len(run.asked.items) or max(map(len, run.asked.answers))].append(run)
        return [figure for (task, size), group in groups.items()
                for figure in self._curve(f"{task}, {size} words: score by words per forward", group)]

    def _curve(self, name: str, runs: list[CanvasRun]) -> list[Figure]:
        answers = runs[0].asked.answers
        length, found = max(map(len, answers)), []
        for together in range(1, length + 1):
            series = {"ideal, left to right": chance_of_right(answers, steps_of(length, together))}
            near = [run for run in runs if min(length, max(1, round(run.together))) == together]
            for strategy in dict.fromkeys(run.strategy for run in near):
                scores = [self._score(run) for run in near if run.strategy == strategy]
                series[strategy] = sum(scores) / len(scores)
            found.append(Figure("scalar", name, {"x": together, "axis": "words per forward", "series": series}))
        return found

    def _score(self, run: CanvasRun) -> float:
        return run.asked.score(run.words, self.unchanged)

    def _said(self, run: CanvasRun) -> Note:
        verdict = "right" if self._score(run) else _mistake(run)
        forwards = f"{run.forwards} forward{'s' if run.forwards > 1 else ''}"
        return Note(f"{run.label}: {' '.join(run.words)} ({verdict}), in {forwards}.")


def read(number: int, trace) -> CanvasRun | None:
    """What a trace of one lane filled; None if it is no canvas, or its prompt is no list question."""
    header = trace.headers[0]
    asked = question(header.prompt)
    text = [stamped.event.text for stamped in trace.events if stamped.event.kind == "commit"]
    if not (header.canvas and asked and text):
        return None
    steps, forwards, fresh = [], 0, False
    for stamped in trace.events:
        if stamped.event.kind == "forward":
            forwards, fresh = forwards + 1, True
        elif stamped.event.kind == "fill" and fresh:  # what is filled without a forward follows from an end token
            steps.append(dict(zip(stamped.event.positions, map(_word, stamped.event.pieces))))
            fresh = False
    title = header.title or header.strategy
    words = tuple("".join(text).split())
    return CanvasRun(f"{number} · {title}", title, asked, tuple(steps), words, forwards)


def _word(piece: str) -> str:
    """The word of a token; empty for an end token."""
    word = piece.strip()
    return word if word.isalpha() else ""


def _bits(run: CanvasRun) -> list[float | None]:
    """Of each forward; None if the words before fit no answer, or are not tokens."""
    known, found = {}, []
    for step in run.steps:
        found.append(total_correlation(run.asked.answers, list(step), known) if run.exact else None)
        known |= step
    return found


def _counted(run: CanvasRun) -> list[float | None]:
    """Bits in all, and the probability of a right answer with this schedule."""
    bits = [value for value in _bits(run) if value is not None]
    if not run.exact:
        return [None, None]
    return [sum(bits), chance_of_right(run.asked.answers, [list(step) for step in run.steps])]


def _mistake(run: CanvasRun) -> str:
    """What is wrong, in a few words."""
    twice = [word for word in dict.fromkeys(run.words) if run.words.count(word) > 1]
    if twice and run.asked.task != "latin square":
        return f"{twice[0]} occurs {run.words.count(twice[0])} times"
    return "the list is unchanged" if run.words == run.asked.items else "not a right answer"
