"""Results of the cache benchmark as plain data and as a Markdown page."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from playground.bench.caches import freed_memory as memory
from playground.bench.caches import memory_ranking as ranking
from playground.bench.caches import recall_score as score
from playground.bench.caches import step_timing as steps
from playground.bench.caches.caches_defaults import NEAR, SLOWER, TASKS
from playground.bench.charts import below
from playground.bench.report_text import Rows, facts_table, failure_lines, markdown_page, section

FORMAT, VERSION = "decoding-playground-caches", 1
SCORE_NOTES = """Every policy answered the same questions, which were held out from training. *Score*: 1 for a right
answer, mean ± one standard error. *Cache size*: the share of a full cache that a query may attend to after the
prefill. Policies with a token budget hold the same number of tokens, on average over layers; the others are set by
their first knob if it has choices, and their cache size is the share of bytes they promise. The first token of an
answer comes from the prefill, which attends to the whole prompt, so needles are numbers of four digits."""
MEMORY_NOTES = f"""A model of random weights read a prompt and wrote a text, under each policy in a separate process.
*Promised*: what the policy is meant to hold, by its budget or its bits. *Storages*: the tensors of the KV cache, their
unused parts included. *Resident*: growth of the process's memory since before the prefill. *Freed* are shares of a full
cache of the same length: promised, saved in the storages, and saved in resident memory compared with the full cache's
process. Memory counts as freed if no more than {NEAR:.0%} of what was promised is missing. *Prompt* is measured one
token after the prompt, the earliest step after which every policy has acted. Policies that quantise dequantise one
layer at a time in every step; that memory is released before the measurement and does not count."""
STEP_NOTES = f"""Lanes under all policies ran side by side after the same prompt, with every event recorded as on the
page, and took one step each per round; the first rounds were dropped. *Over plain* is the ratio within each round,
median (lowest to highest); *all together* is the ratio of total seconds, which includes quantisation that happens once
in many steps. "Full cache, once more" shows how much two equal lanes differ. The median should be at most {SLOWER}. On
a CPU, a plain step of this network takes about 550 torch calls, with nearly all of its time in the 49 matrix products
with weights. A step that evicts a token takes about 1,200: it computes attention explicitly, chooses, and closes the
gap in every layer and head. A step that merges what it evicts takes 2,200 to 2,400, none of them long: layers hold
different tokens, so that most of the work is done layer by layer. What remains is the overhead per call, which does not
grow with the width of a network."""


RANKING_NOTES = """At a limit of memory every policy counts with its best setting that fits, by the shares above.
Equal scores share a place. A policy that fits at one limit only has a place there only; those come last."""
CLAIM_NOTES = """NVIDIA's kvpress compared policies on RULER at 4k tokens, with models of about 4 to 12 billion
parameters, and says in words how they rank (evaluation/README.md). The tasks here are smaller: one needle in a passage
of about 270 tokens is the nearest to RULER, whose prompts end with the question as well. The figures of its leaderboard
are not repeated here: https://huggingface.co/spaces/nvidia/kvpress-leaderboard."""


@dataclass
class Findings:
    """Everything measured; parts that were not requested are empty. facts: settings and machine."""

    facts: dict[str, Any]
    scores: list[score.Measured] = field(default_factory=list)
    memory_results: list[memory.MemoryResult] = field(default_factory=list)
    step_times: list[steps.StepTimes] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **self.facts, "score": [each.to_json() for each in self.scores],
                "memory": [each.to_json() for each in self.memory_results],
                "step": [each.to_json() for each in self.step_times], "failures": self.failures()}

    def tables(self) -> list[tuple[str, str, Rows]]:
        """Title, note and rows of each part."""
        parts = (
            ("Score against cache size", SCORE_NOTES, self.scores, score.rows),
            ("At equal memory", RANKING_NOTES, self.scores, ranking.ranking_rows),
            ("Beside kvpress", CLAIM_NOTES, self.scores, ranking.claim_rows),
            ("Memory", MEMORY_NOTES, self.memory_results, memory.rows),
            ("A step", STEP_NOTES, self.step_times, steps.rows),
        )
        return [(title, note, rows(found)) for title, note, found, rows in parts if found]

    def verdicts(self) -> list[str]:
        """A sentence per requirement: how many policies meet it, and which do not."""
        gaps = memory.freed(self.memory_results) if self.memory_results else {}
        missing = [name for name, both in gaps.items() if not all(gap.holds for gap in both)]
        ratios = steps.ratios(self.step_times) if self.step_times else []
        slow = [ratio.name for ratio in ratios if not ratio.holds]
        return [*([f"Memory is freed as promised, within {NEAR:.0%}: {_counts(gaps, missing)}"] if gaps else []),
                *([f"A step takes at most {SLOWER} times the plain one: {_counts(ratios, slow)}"] if ratios else [])]

    def failures(self) -> list[str]:
        scores = [(each.entrant, each.failure) for each in self.scores]
        others = [(each.name, each.failure) for each in (*self.memory_results, *self.step_times)]
        return failure_lines((*scores, *others))

    def picture(self) -> str:
        """The figure as SVG: one panel per task."""
        answered = {each.task for each in self.scores if each.score}
        return below([score.chart(task, self.scores) for task in TASKS if task in answered])

    def page(self, picture: str) -> str:
        """The Markdown page; `picture` is the path of the figure relative to the page."""
        return markdown_page(
            "# Cache policies",
            "Made by `python -m playground bench caches --out --page`.",
            "\n".join(f"- {sentence}" for sentence in (*self.verdicts(), *self.failures())),
            facts_table(self.facts),
            *self.sections(picture).values(),
        )

    def sections(self, picture: str) -> dict[str, str]:
        """The sections of the page by title."""
        figure = f"![Score of every policy against its cache size]({picture})"
        return {title: section(title, rows, note, *[figure] * (note is SCORE_NOTES))
                for title, note, rows in self.tables()}


def _counts(everyone: Any, failed: list[str]) -> str:
    return f"{len(everyone) - len(failed)} of {len(everyone)}" + (f", not {', '.join(failed)}." if failed else ".")
