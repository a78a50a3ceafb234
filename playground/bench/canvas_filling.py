"""Decoders of masked canvases, task by task: scores, forwards and seconds of each beside one position per forward.

Every decoder fills the canvas of every question on its own, in one process, interleaved question by question, and the
order rotates. An autoregressive lane answers the same questions with a model of the same size.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import playground
from playground.bench.report_text import Rows, facts_table, markdown_page, section
from playground.contract import find
from playground.decoding.models import Models
from playground.lane_fields import LaneConfig
from playground.pocket.cards.canvas_scores import ROWS, exam
from playground.questions.world import Item, score

BASELINE, AUTOREGRESSIVE = "one position per forward", "autoregressive, greedy"
BLOCK = {"block_length": 16}
LANES: dict[str, LaneConfig] = {
    BASELINE: LaneConfig("masked_diffusion", BLOCK),
    "two positions per forward": LaneConfig("dkv_cache", BLOCK | {"count": 2, "interval": 1}),
    "threshold 0.9": LaneConfig("fast_dllm", BLOCK | {"cache": "none"}),
    "threshold 0.5": LaneConfig("fast_dllm", BLOCK | {"cache": "none", "threshold": 0.5}),
    "token editing, threshold 0.5": LaneConfig("token_editing", BLOCK),
    "WINO, threshold 0.6": LaneConfig("wino", BLOCK),
    "factor 1": LaneConfig("fast_dllm", BLOCK | {"cache": "none", "rule": "factor"}),
    **{
        f"threshold {least}, prefix cache": LaneConfig("fast_dllm", BLOCK | {"cache": "prefix", "threshold": least})
        for least in (0.9, 0.97, 0.99)
    },
    "one position, prefix cache": LaneConfig("fast_dllm", BLOCK | {"cache": "prefix", "threshold": 1.0}),
    "threshold 0.9, dual cache": LaneConfig("fast_dllm", BLOCK | {"cache": "dual"}),
    "dKV-Cache, one position": LaneConfig("dkv_cache", BLOCK),
    "LocalLeap": LaneConfig("local_leap", BLOCK),
    "AdaBlock": LaneConfig("adablock", BLOCK),
    "bounded adaptive confidence": LaneConfig("bacd", BLOCK),
    "Explore-Then-Exploit": LaneConfig("explore_then_exploit", BLOCK),
    "Window-Diffusion, threshold 0.9": LaneConfig("window_diffusion", {"threshold": 0.9}),
    "Elastic-Cache, threshold 0.9": LaneConfig("elastic_cache"),
    "Dream's sampler, half the steps": LaneConfig("dream", {"steps": 32}),
}


@dataclass(frozen=True)
class Filled:
    """One answer: its task, decoder, score from 0 to 1, tokens of the text, forwards, positions computed, seconds."""

    task: str
    lane: str
    score: float
    tokens: int
    forwards: int
    computed: int
    seconds: float


def runnable(models: Models) -> list[str]:
    """The decoders that can run with the attention of the model."""
    return [name for name, config in LANES.items() if models.target.attention in find(config.strategy).attention]


def answers(models: Models, beside: Models | None, items: int, seed: int) -> Iterator[Filled]:
    """Answer `items` held-out questions of every task with every decoder. `beside` holds the autoregressive model."""
    lanes = [*runnable(models), *[AUTOREGRESSIVE] * (beside is not None)]
    questions = exam(items, seed)
    for turn in range(items):
        for task in questions:
            for lane in lanes[turn % len(lanes):] + lanes[:turn % len(lanes)]:
                yield answer(beside if lane == AUTOREGRESSIVE else models, task, lane, questions[task][turn])


def answer(models: Models, task: str, lane: str, item: Item) -> Filled:
    """One answer. Raises RuntimeError if the lane fails."""
    config = LANES.get(lane, LaneConfig("greedy"))
    (result,) = playground.compare([config], item.prompt, models=models, chat=True, max_new_tokens=ROWS[task][2])
    if result.reason == "failed":
        raise RuntimeError(f"{lane}: {result.message}")
    forwards = [event for event in result.trace.events if event.event.kind == "forward"]
    return Filled(
        task, lane, score(item, result.text), len(result.token_ids), len(forwards),
        sum(event.event.tokens for event in forwards), result.metrics["seconds"],
    )


def complete(found: list[Filled], decoders: int) -> list[Filled]:
    """Of every task as many answers of each decoder as all of so many have given, in case the run was stopped."""
    groups = defaultdict(lambda: defaultdict(list))
    for one in found:
        groups[one.task][one.lane].append(one)
    least = {task: min(map(len, lanes.values())) if len(lanes) == decoders else 0 for task, lanes in groups.items()}
    return [one for task, lanes in groups.items() for some in lanes.values() for one in some[:least[task]]]


def page(found: list[Filled], facts: dict[str, dict]) -> str:
    """The Markdown page of a run."""
    return markdown_page(TITLE, facts_table(facts), section("All tasks", _rows(found)), *(
        section(task.capitalize(), _rows(some)) for task in ROWS if (some := [one for one in found if one.task == task])
    ))


TITLE = """# Masked diffusion

Made by `python -m playground bench diffusion --out --page`.

Every decoder that can run on the model fills the canvas of the same held-out questions on its own, in one process,
interleaved question by question. Blocks have 16 positions, knobs that are not named have their defaults. *Score*: mean
of the task's metric. *Right*: questions with full score. *Tokens per forward*: tokens of the text, up to its end,
divided by all forwards; the trials of Explore-Then-Exploit are forwards. *Computed*: positions that pass through the
network per token. *Times faster*: seconds of one position per forward divided by the decoder's own, of all questions
together. The autoregressive lane is the bundled `pocket`, of the same size, from whose weights both denoisers were
trained for minutes on a GPU: it is a lane to compare costs with, not a fair rival. `pocket-block-diffusion` answers
most questions, `pocket-diffusion` hardly any sum ([why](pocket-training.md#denoisers)). A few questions per task cannot
tell decoders apart by score, and differences of one or two questions are chance. Token editing and WINO take back what
others would leave: their rivals are the plain thresholds that fill as many positions at once."""


def _rows(found: list[Filled]) -> Rows:
    lanes = defaultdict(list)
    for one in found:
        lanes[one.lane].append(one)
    base = sum(one.seconds for one in lanes[BASELINE])
    head = ["decoder", "score", "right", "tokens per forward", "computed", "s per question", "times faster"]
    return [head, *(_row(lane, some, base) for lane, some in sorted(lanes.items(), key=lambda pair: _place(pair[0])))]


def _place(lane: str) -> int:
    return list(LANES).index(lane) if lane in LANES else len(LANES)


def _row(lane: str, found: list[Filled], base: float) -> list[str]:
    count, tokens = len(found), max(1, sum(one.tokens for one in found))
    seconds, forwards = sum(one.seconds for one in found), sum(one.forwards for one in found)
    right = sum(one.score == 1 for one in found)
    return [
        lane, f"{sum(one.score for one in found) / count:.2f}", f"{right} of {count}", f"{tokens / forwards:.2f}",
        f"{sum(one.computed for one in found) / tokens:.0f}", f"{seconds / count:.2f}", f"{base / seconds:.1f}",
    ]


def document(found: list[Filled], facts: dict[str, dict]) -> dict:
    """Everything, for a JSON file."""
    return {"format": "decoding-playground-diffusion", "version": 1, **facts, "answers": [asdict(one) for one in found]}
