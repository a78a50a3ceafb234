"""The overhead of strategies outside forwards, as data and as a page. Imports neither torch nor transformers."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from playground.bench.bookkeeping.bookkeeping_defaults import BYTES, COMMAND, MILLISECONDS
from playground.bench.report_text import Rows, facts_table, markdown_page, paragraphs, section

if TYPE_CHECKING:
    from playground.bench.bookkeeping.bookkeeping_trial import Bookkeeping

FORMAT, VERSION = "decoding-playground-bookkeeping", 1
HEADER = ["strategy", "lane", "prompt tokens", "ms per token or round", "bytes per token", "rounds", "rows per round",
          "before, ms", "before, bytes"]
INTRODUCTION = (
    "# Bookkeeping",
    "The overhead of every strategy outside forwards, measured with a stand-in for a model: its logits are looked up, "
    "its KV cache has the layers of a large model with 8 KV heads, and its hidden states have 64 dimensions. Every "
    "strategy runs in one lane with its defaults, after a long passage and a question. Limits: "
    f"{MILLISECONDS:g} ms of CPU time per token or round, whichever there are more of, and {BYTES:,} bytes of events "
    "per token, as in a saved trace. The prompt and the first round after it are counted separately: there cache "
    "policies make their first selection and drafters index the prompt.",
    "CPU time is measured, not elapsed time: that of the one thread that runs the lane, in the fastest of three runs, "
    "since other work on the machine slows caches and cores down; the last table names the load. Other threads and "
    "processes, such as the one that compiles grammars, do not count. What a cache policy computes inside an attention "
    "counts as part of the forward. "
    "Strategies that read the attention weights, the query states or the logits of the whole prompt have a shorter "
    "one, and so have those that do not read the longer one in time or have a limit of their own.",
    "Some work is unavoidable. On an idle core of this kind a softmax over 150,000 float32 scores takes 0.12 ms, "
    "in float64 0.22 ms; a cumulative sum takes 0.15 ms, a logarithm of each 0.16 ms, and a full sort 12 ms. So a "
    "full sort is avoided wherever a few of the largest suffice. The row of `greedy` shows the cost of choosing and "
    "recording alone. A round of several rows scores each of them, early exits and second models add rows to "
    "every token, and a cache policy that evicts acts on every layer separately: 32 times about 20 operations of a few "
    "microseconds.",
    f"Written by `{COMMAND}`.",
)


def document(facts: dict[str, Any], results: Iterable[Bookkeeping]) -> dict[str, Any]:
    """Plain data for JSON."""
    return {"format": FORMAT, "version": VERSION, **facts, "strategies": [result.to_json() for result in results]}


def table(results: Iterable[Bookkeeping]) -> Rows:
    """A row per strategy, those that exceed a limit most first."""
    ranked = sorted(results, key=lambda result: (not result.failure, -result.excess))
    return [HEADER, *map(_row, ranked)]


def verdict(results: list[Bookkeeping]) -> str:
    """How many strategies meet both limits."""
    failed = [result for result in results if result.failure]
    missed = [result for result in results if not result.failure and result.excess > 1]
    slow = [result for result in missed if result.milliseconds > MILLISECONDS]
    large = [result for result in missed if result.bytes_per_token > BYTES]
    return (
        f"{len(results) - len(failed) - len(missed)} of {len(results)} strategies meet both limits, {len(slow)} take "
        f"longer than {MILLISECONDS:g} ms, {len(large)} record more than {BYTES:,} bytes, and {len(failed)} could not "
        "be measured."
    )


def page(facts: dict[str, Any], results: list[Bookkeeping]) -> str:
    """The page docs/bookkeeping.md; strategies that miss a limit come first."""
    missed = [result for result in results if not result.failure and result.excess > 1]
    met = [result for result in results if not result.failure and result.excess <= 1]
    failures = [f"- {result.strategy}: {result.failure}" for result in results if result.failure]
    return markdown_page(
        *INTRODUCTION,
        verdict(results),
        "Strategies that are not listed were not measured in these runs." if facts.get("partial") else "",
        section("Strategies that miss a limit", table(missed)) if missed else "",
        section("Strategies that meet both", table(met)) if met else "",
        paragraphs("## Strategies that could not be measured", "\n".join(failures)) if failures else "",
        paragraphs("## Settings and machine", facts_table(facts)),
    )


def _row(result: Bookkeeping) -> list[str]:
    if result.failure:
        return [f"`{result.strategy}`", "not measured", *["-"] * (len(HEADER) - 2)]
    return [
        f"`{result.strategy}`",
        result.lane,
        f"{result.prompt:,}",
        f"{result.milliseconds:.2f}",
        f"{result.bytes_per_token:,.0f}",
        f"{result.rounds}{', stopped' if result.stopped else ''}",
        f"{result.rows / max(result.rounds, 1):.1f}",
        f"{1000 * result.prompt_seconds:,.0f}",
        f"{result.prompt_bytes:,}",
    ]
