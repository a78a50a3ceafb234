"""Results of the comparison of grammar engines: a row per kind of grammar, the differences, and a page."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import Any

from playground.bench.engines.engine_trial import EngineComparison, EngineResult
from playground.bench.report_text import Rows, facts_table, markdown_page, section

FORMAT, VERSION = "decoding-playground-engines", 1
SHOWN = 60  # characters of a text in a table


def mask_rows(found: Sequence[EngineComparison]) -> Rows:
    """A row per kind: how many grammars, and at how many positions the masks agree."""
    header = ["grammars", "number", *(f"refused by {name}" for name in _engines(found))]
    rows = [
        [kind, str(len(some)), *(str(sum(bool(c.by_engine[name].refusal) for c in some)) for name in _engines(found)),
         *map(str, (
             sum(c.positions for c in some), sum(c.equal for c in some), sum(c.canonical for c in some),
             sum(c.special for c in some), sum(c.different for c in some), sum(bool(c.different) for c in some),
         ))]
        for kind, some in _by_kind(found)
    ]
    outcomes = ["positions", "equal masks", "other tokenisations", "special tokens", "different", "in grammars"]
    return [[*header, *outcomes], *rows]


def time_rows(found: Sequence[EngineComparison]) -> Rows:
    """A row per kind and engine: compile time, and median and 99th percentile of the times of single masks."""
    rows = []
    for kind, some in _by_kind(found):
        for name in _engines(found):
            results = [c.by_engine[name] for c in some if not any(each.refusal for each in c.by_engine.values())]
            rows.append([kind, name, *_times(results)])
    return [["grammars", "engine", "compile, ms", "mask, us", "99 %", "slowest"], *rows]


def _times(results: Sequence[EngineResult]) -> list[str]:
    masks = sorted(seconds for result in results for seconds in result.mask_seconds)
    if not masks:
        return ["-"] * 4
    compiled = median(result.compile_seconds for result in results) * 1e3
    shown = (median(masks), masks[int(0.99 * (len(masks) - 1))], masks[-1])
    return [f"{compiled:.1f}", *(f"{seconds * 1e6:.0f}" for seconds in shown)]


def instance_rows(found: Sequence[EngineComparison]) -> Rows:
    """A row per engine: of the instances of the schemas it accepts, how many it judges wrongly."""
    rows = []
    for name in _engines(found):
        accepted = [c for c in found if not c.by_engine[name].refusal]
        rows.append([name, str(sum(len(c.source.instances) for c in accepted)),
                     str(sum(c.by_engine[name].forbidden for c in accepted)),
                     str(sum(c.by_engine[name].let_through for c in accepted))])
    return [["engine", "instances", "valid, rejected", "invalid, accepted"], *rows]


def difference_rows(found: Sequence[EngineComparison]) -> Rows:
    """A row for each token that only one engine allows, in how many grammars, with an example."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for c in found:
        for text, what, only in c.differences:
            groups.setdefault((c.source.kind, only, what), []).append((c.source.name, text))
    rows = [
        [kind, only, what if what == "the end" else repr(what), str(len(dict.fromkeys(places))), places[0][0],
         repr(_shortened(places[0][1]))]
        for (kind, only, what), places in sorted(groups.items())
    ]
    return [["grammars", "allowed only by", "token", "in grammars", "for example", "after the text"], *rows]


def verdict_rows(found: Sequence[EngineComparison]) -> Rows:
    """A row per grammar that one engine alone refuses, and per engine that judges instances of a schema wrongly."""
    rows = []
    for c in found:
        refused = [name for name, result in c.by_engine.items() if result.refusal]
        if len(refused) == 1:
            rows.append([c.source.name, refused[0], f"refused: {_shortened(c.by_engine[refused[0]].refusal, 110)}"])
        rows += [[c.source.name, name, said] for name, result in c.by_engine.items() for said in _misjudged(result)]
    return [["grammar", "engine", ""], *rows]


def _misjudged(result: EngineResult) -> list[str]:
    counts = ((result.forbidden, "valid", "rejected"), (result.let_through, "invalid", "accepted"))
    return [f"{count} {kind} instance{'s' if count > 1 else ''} {done}" for count, kind, done in counts if count]


def _shortened(text: str, most: int = SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


ABOUT = """The constraints of the playground are enforced by llguidance. `python -m playground bench engines --page`
compares it with XGrammar (Dong et al. 2024, arXiv 2411.15100), which is not installed with the project: `pip install
xgrammar`. Both compile the same grammars. Random texts are written under the masks of either engine, and at every
position of them both masks are computed and compared token by token. JSON has one space after a comma or colon, as by
default in `json_schema`; XGrammar reads schemas with `strict_mode=False`, which allows further properties where the
schema does."""
ABOUT_MASKS = """*Other tokenisations*: where only one continuation is possible, llguidance allows only the tokenizer's
own token for it, and XGrammar all tokens that fit; the texts are the same. *Special tokens*: only one engine allows
a special token, such as the one that begins a turn, which it reads as its name, for instance inside a string.
*Different*: some other token, or the end of the text, is allowed by one engine and not by the other."""
ABOUT_TIMES = """Of grammars that both engines accept. Here llguidance first compiles in a process of its own, with
limits on time and memory, and then once more; both are part of its compile time. A mask is the bitmask of one
position."""
ABOUT_DIFFERENCES = "Of every position one token counts. Bytes that are not UTF-8 are written <0xE2>."
ABOUT_INSTANCES = """Instances that come with the schemas, of those that the engine accepts. The schemas in
`tests/schemas` are this project's own tests, of which llguidance refuses what it cannot enforce."""
ABOUT_VERDICTS = "Grammars that only one engine refuses, and schemas with instances that an engine judges wrongly."


def page(facts: dict[str, Any], found: Sequence[EngineComparison]) -> str:
    """The page, in Markdown."""
    return markdown_page(
        "# Two grammar engines",
        ABOUT,
        section("Masks", mask_rows(found), ABOUT_MASKS, _summary(found)),
        section("Times", time_rows(found), ABOUT_TIMES),
        section("Differences between masks", difference_rows(found), ABOUT_DIFFERENCES),
        section("Instances of the schemas", instance_rows(found), ABOUT_INSTANCES),
        section("Refusals and wrong judgements", verdict_rows(found), ABOUT_VERDICTS),
        "## Settings",
        facts_table(facts),
    )


def _summary(found: Sequence[EngineComparison]) -> str:
    both = [c for c in found if c.positions]
    same = sum(not c.different for c in both)
    return (
        f"Of {len(found)} grammars both engines accept {len(both)}; {same} of these have the same masks at every "
        "position, up to other tokenisations and special tokens."
    )


def document(facts: dict[str, Any], found: Sequence[EngineComparison]) -> dict[str, Any]:
    """Plain data for JSON."""
    return {"format": FORMAT, "version": VERSION, **facts, "grammars": [_as_json(c) for c in found]}


def _as_json(c: EngineComparison) -> dict[str, Any]:
    engines = {
        name: {
            "refusal": result.refusal,
            "compile_seconds": result.compile_seconds,
            "median_mask_seconds": median(result.mask_seconds) if result.mask_seconds else None,
            "forbidden": result.forbidden,
            "let_through": result.let_through,
        }
        for name, result in c.by_engine.items()
    }
    return {
        "kind": c.source.kind, "name": c.source.name, "engines": engines, "equal": c.equal, "canonical": c.canonical,
        "special": c.special, "different": c.different, "differences": [each._asdict() for each in c.differences],
    }


def _engines(found: Sequence[EngineComparison]) -> list[str]:
    return list(found[0].by_engine) if found else []


def _by_kind(found: Sequence[EngineComparison]) -> list[tuple[str, list[EngineComparison]]]:
    return [(kind, list(some)) for kind, some in groupby(found, key=lambda c: c.source.kind)]
