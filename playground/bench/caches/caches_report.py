"""The cache policies as plain data and as a page."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from playground.bench.caches import freed_memory as memory
from playground.bench.caches import recall_score as score
from playground.bench.caches import step_timing as steps
from playground.bench.caches.caches_defaults import NEAR, SLOWER, TASKS
from playground.bench.charts import below
from playground.bench.survey_export import facts_table, markdown

FORMAT, VERSION = "decoding-playground-caches", 1
SCORE_NOTES = """Every policy answered the same questions, which training never showed. *Score*: 1 for a right answer, mean ± one standard error. *Room*:
of a full cache, what a row may look at once the prompt was read. Policies that go by tokens hold the same number of them, on average
over layers; the others are set by their first knob where that is a menu, and their room is the bytes they promise. The first token
of an answer comes from the prompt's own forward, which saw everything, so needles are numbers of four digits."""
MEMORY_NOTES = f"""A model of random weights read a prompt and wrote behind it, under each policy in a process of its own. *Promised*: what the policy means to
hold, by its budget or by its bits. *Storages*: the tensors that hold keys and values, with whatever part of them is not used. *Resident*:
what the process took beyond what it had before the prompt. *Freed* are shares of a full cache of the same length: promised, missing in
the storages, and missing in the resident memory against the full cache's own process. It counts as freed where no more than
{NEAR:.0%} of what was promised is missing. *Prompt* is the moment with one token behind the prompt, the earliest at which every policy has acted.
Policies that pack unpack a layer at a time in every step; that room is handed back before the look, so it does not count."""
STEP_NOTES = f"""Lanes under all policies stood side by side behind the same prompt, with every event recorded as on the page, and took a step each in turn; the
first rounds were dropped. *Over plain* is taken within each round, median (lowest to highest); *all together* is all seconds over all plain
ones, which counts packing that comes once in many steps. The full cache once more says how far two equal lanes are apart. Of the
median at most {SLOWER} is wanted. On a processor a plain step of this network is some 550 calls of torch, nearly all its time in 49 of them, the products
with weights. One that evicts a token is some 1,200: it writes attention out, chooses, and closes the hole in every layer and head. One that
merges what it evicts is 2,200 to 2,400, none of which is long: the layers hold unlike tokens, and most of that is done for one after the other. What
remains is the price of a call, which does not grow with the width of a network."""


@dataclass
class Findings:
    """What was measured; a part that was not asked for is empty. facts: settings and machine."""

    facts: dict[str, Any]
    scores: list[score.Measured] = field(default_factory=list)
    weighings: list[memory.Weighing] = field(default_factory=list)
    paces: list[steps.Pace] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **self.facts, "score": [each.to_json() for each in self.scores],
                "memory": [each.to_json() for each in self.weighings], "step": [each.to_json() for each in self.paces],
                "failures": self.failures()}

    def tables(self) -> list[tuple[str, str, list[list[str]]]]:
        """Title, note and rows of each part."""
        parts = (
            ("Score against room", SCORE_NOTES, self.scores, score.rows),
            ("Memory", MEMORY_NOTES, self.weighings, memory.rows),
            ("A step", STEP_NOTES, self.paces, steps.rows),
        )
        return [(title, note, rows(found)) for title, note, found, rows in parts if found]

    def verdicts(self) -> list[str]:
        """A sentence for each promise: who kept it, and who did not."""
        gaps = memory.freed(self.weighings) if self.weighings else {}
        missing = [name for name, both in gaps.items() if not all(gap.holds for gap in both)]
        paced = steps.ratios(self.paces) if self.paces else []
        slow = [ratio.name for ratio in paced if not ratio.holds]
        return [*([f"Memory is freed as promised, within {NEAR:.0%}: {_kept(gaps, missing)}"] if gaps else []),
                *([f"A step takes at most {SLOWER} times the plain one: {_kept(paced, slow)}"] if paced else [])]

    def failures(self) -> list[str]:
        scores = [(each.entrant, each.failure) for each in self.scores]
        others = [(each.name, each.failure) for each in (*self.weighings, *self.paces)]
        return list(dict.fromkeys(f"{name}: {failure}" for name, failure in (*scores, *others) if failure))

    def picture(self) -> str:
        """The figure as SVG: a panel for each task."""
        return below([score.chart(task, self.scores) for task in TASKS])

    def page(self, picture: str) -> str:
        """In Markdown; `picture` is the path of the figure as seen from the page."""
        said = "\n".join(f"- {sentence}" for sentence in (*self.verdicts(), *self.failures()))
        parts = [
            "# Cache policies",
            "Made by `python -m playground bench caches --out --page`.",
            said,
            facts_table(self.facts),
        ]
        for title, note, rows in self.tables():
            shown = (
                [f"![Score of every policy against the room it has]({picture})"]
                if rows[0][1].startswith("room")
                else []
            )
            parts += [f"## {title}", note, *shown, markdown(rows)]
        return "\n\n".join(part for part in parts if part) + "\n"


def _kept(everyone: Any, failed: list[str]) -> str:
    return f"{len(everyone) - len(failed)} of {len(everyone)}" + (f", not {', '.join(failed)}." if failed else ".")
