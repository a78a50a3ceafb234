"""What filling positions together costs: list tasks answered by decoders over the exact table of their answers.

The denoiser is ideal, so every error is the decoder's. Scores are beside the probability that can be counted. After
ParallelBench, Kang et al. 2025, arXiv 2510.04767.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from random import Random

import playground
from playground.algorithms.diffusion.parallel_lists import (
    TASKS,
    ListQuestion,
    ask,
    chance_of_right,
    steps_of,
    total_correlation,
)
from playground.bench.report_text import Rows, facts_table, markdown_page, number, section
from playground.decoding.models import Models
from playground.engine.canvas.table_denoiser import OracleDenoiser
from playground.engine.text.tokens import Tokens
from playground.events import Forward
from playground.lane_fields import LaneConfig

LENGTH, SQUARE = 4, 3  # words of a list, and of a row of a square
TOGETHER = (1, 2, 4)  # words per forward of the fixed schedules
SAMPLED = {"temperature": 1.0}
ADAPTIVE: dict[str, LaneConfig] = {
    "threshold 0.9": LaneConfig("fast_dllm", {"cache": "none", **SAMPLED}),
    "factor 1": LaneConfig("fast_dllm", {"cache": "none", "rule": "factor", **SAMPLED}),
    "LocalLeap": LaneConfig("local_leap", SAMPLED),
    "Explore-Then-Exploit": LaneConfig("explore_then_exploit", SAMPLED),
}


@dataclass(frozen=True)
class ListAnswer:
    """One answer: its task, decoder, whether it is right, its words, and forwards."""

    task: str
    lane: str
    right: bool
    words: int
    forwards: int


def decoders(length: int) -> dict[str, LaneConfig]:
    """The lanes that answer a question with so many positions."""
    fixed = {
        f"{together} from left to right": LaneConfig("masked_diffusion", {
            "order": "left_to_right", "steps": ceil(length / together), **SAMPLED})
        for together in TOGETHER
    }
    greedy = {"all at once, most probable": LaneConfig("masked_diffusion", {"steps": 1})}
    return {**fixed, "all at once": LaneConfig("masked_diffusion", {"steps": 1, **SAMPLED}), **greedy, **ADAPTIVE}


def answers(samples: int, seed: int) -> Iterator[ListAnswer]:
    """Answers of every decoder to `samples` questions of each task."""
    chance = Random(seed)
    for task in TASKS:
        for turn in range(samples):
            asked = ask(task, SQUARE if task == "latin square" else LENGTH, chance)
            for lane, config in decoders(len(asked.answers[0])).items():
                yield answer(asked, lane, config, seed + turn)


def answer(asked: ListQuestion, lane: str, config: LaneConfig, seed: int) -> ListAnswer:
    """One answer over the table of this question. Raises RuntimeError if the lane fails."""
    (result,) = playground.compare([config], "answer", models=table(asked), seed=seed, max_new_tokens=64)
    if result.reason == "failed":
        raise RuntimeError(f"{lane}: {result.message}")
    words = result.text.split()
    forwards = sum(isinstance(stamped.event, Forward) for stamped in result.trace.events)
    return ListAnswer(asked.task, lane, bool(asked.score(words, unchanged=True)), len(words), forwards)


def complete(found: list[ListAnswer], samples: int) -> list[ListAnswer]:
    """The answers to tasks of which every decoder has answered all questions, in case the run was stopped."""
    counts = Counter(one.task for one in found)
    return [one for one in found if counts[one.task] == samples * len(decoders(LENGTH))]


@lru_cache(maxsize=2)
def table(asked: ListQuestion) -> Models:
    """The exact denoiser of a question: its answers without padding, after a prompt of one word."""
    length = len(asked.answers[0])
    padded = OracleDenoiser.from_texts([f"answer {' '.join(words)}" for words in asked.answers], name=asked.prompt)
    strings = padded.strings[:, :length + 1]
    return Models(OracleDenoiser(strings, padded.p, Tokens(padded.tokens.tokenizer, padded.vocabulary), padded.end_ids,
                                 asked.prompt))


def page(found: list[ListAnswer], facts: dict[str, dict]) -> str:
    """The Markdown page of a run."""
    return markdown_page(
        TITLE, facts_table(facts), section("What can be counted", counted(), COUNTED),
        section("Right answers", _scores(found), SCORES), section("Words per forward", _speeds(found), SPEEDS),
    )


TITLE = """# Lists, filled in parallel

Made by `python -m playground bench parallel --out --page`.

Eleven list tasks after ParallelBench, answered over the exact table of their right answers: the denoiser is ideal, and
every error comes from filling positions together that depend on each other. A word is one token. Lists have four words,
the square three rows of three. All decoders sample at temperature 1 except the one named otherwise."""
COUNTED = """*Bits*: total correlation of all positions, by which words drawn independently fall short of the joint law.
The other columns are the probability of a right answer if at most so many words are filled per forward, from left to
right, as evenly as the decoders below do."""
SCORES = """A shuffled list may be in its old order, as in the count above."""
SPEEDS = """Words of the answer divided by forwards; the trials of Explore-Then-Exploit are forwards."""


def counted() -> Rows:
    """Bits and probabilities of a right answer, by task."""
    rows = [["task", "bits", *(f"{together} per forward" for together in TOGETHER), "all at once"]]
    for task in TASKS:
        known = ask(task, SQUARE if task == "latin square" else LENGTH, Random(0)).answers
        length = len(known[0])
        chances = [chance_of_right(known, steps_of(length, together)) for together in (*TOGETHER, length)]
        bits = total_correlation(known, range(length), {})
        rows.append([task, f"{bits:.2f}", *(f"{chance:.3f}" for chance in chances)])
    return rows


def _scores(found: list[ListAnswer]) -> Rows:
    return _by_task(found, lambda some: f"{sum(one.right for one in some) / len(some):.2f}")


def _speeds(found: list[ListAnswer]) -> Rows:
    return _by_task(found, lambda some: number(sum(one.words for one in some) / sum(one.forwards for one in some), 2))


def _by_task(found: list[ListAnswer], cell) -> Rows:
    """A table with a row for each task and a column for each decoder."""
    groups = defaultdict(list)
    for one in found:
        groups[one.task, one.lane].append(one)
    tasks, lanes = (list(dict.fromkeys(key[part] for key in groups)) for part in (0, 1))
    whole = [task for task in tasks if all(groups.get((task, lane)) for lane in lanes)]
    return [["task", *lanes], *([task, *(cell(groups[task, lane]) for lane in lanes)] for task in whole)]


def document(found: list[ListAnswer], facts: dict[str, dict]) -> dict:
    """The sums of every task and decoder, for a JSON file."""
    totals: dict[tuple[str, str], dict[str, int]] = {}
    for one in found:
        sums = totals.setdefault((one.task, one.lane), dict.fromkeys(("answers", "right", "words", "forwards"), 0))
        for name, value in (("answers", 1), ("right", one.right), ("words", one.words), ("forwards", one.forwards)):
            sums[name] += value
    rows = [{"task": task, "decoder": lane, **sums} for (task, lane), sums in totals.items()]
    return {"format": "decoding-playground-parallel", "version": 1, **facts, "totals": rows}
