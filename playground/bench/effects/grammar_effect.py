"""A schema makes every record valid without lowering scores. JSONSchemaBench, Geng et al. 2025, arXiv 2501.10868."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from playground.bench.charts import Chart
from playground.bench.effects.answer_comparison import (
    NEARLY,
    PLAIN,
    SURE,
    against,
    not_worse,
    score,
    significantly_better,
    value,
)
from playground.bench.effects.effect import Effect, EffectVerdict
from playground.bench.survey.survey import Answer, Entrant
from playground.lane_fields import LaneConfig
from playground.questions.questions import Question, ask

DRAWN, BOUND, BOUND_DRAWN = "temperature 1", "greedy, schema", "temperature 1, schema"


@dataclass(frozen=True)
class WithSchema(Entrant):
    """Writes each record constrained by the record's own JSON Schema."""

    def config_for(self, question: Question) -> LaneConfig:
        schema = json.dumps(question.meta["schema"])
        return replace(self.config, extras=[*self.config.extras, ("json_schema", {"source": schema})])


def grammar(count: int = 120, seed: int = 1) -> Effect:
    """Records with and without a grammar, greedy and sampled."""
    sampled = LaneConfig("sample", {"temperature": 1.0, "top_p": 1.0})
    entrants = [
        Entrant(PLAIN, LaneConfig("greedy")),
        WithSchema(BOUND, LaneConfig("greedy")),
        Entrant(DRAWN, sampled),
        WithSchema(BOUND_DRAWN, sampled),
    ]
    return Effect(
        "grammar",
        "A grammar compiled from the record's own schema makes every record valid without lowering the score.",
        "With the schema every record is valid, greedily and at temperature 1; at temperature 1 more are valid than "
        f"without it (sign test, p < {SURE}); in both cases the score falls by at most {NEARLY}.",
        entrants,
        ask("records", count, seed),
        330,
        shown,
        chart,
    )


def shown(answers: list[Answer]) -> EffectVerdict:
    valid = validity(answers)
    shares = {f"valid, {name}": score(valid, name) for name in (PLAIN, BOUND, DRAWN, BOUND_DRAWN)}
    gain = against(valid, BOUND_DRAWN, DRAWN)
    right = {
        f"right, {bound} against {free}": against(answers, bound, free)
        for bound, free in ((BOUND, PLAIN), (BOUND_DRAWN, DRAWN))
    }
    all_valid = all(
        (found := shares[f"valid, {name}"]) is not None and found.mean == 1 for name in (BOUND, BOUND_DRAWN)
    )
    return EffectVerdict(all_valid and significantly_better(gain) and all(map(not_worse, right.values())),
                         {**shares, f"valid, {BOUND_DRAWN} against {DRAWN}": gain, **right})


def validity(answers: Iterable[Answer]) -> list[Answer]:
    """The same answers, scored by whether they are valid under the schema of their question."""
    return [
        answer
        if answer.failure
        else replace(answer, score=float(is_valid(answer.text, answer.question.meta["schema"])))
        for answer in answers
    ]


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON of the given schema."""
    try:
        return fits(json.loads(text), schema)
    except ValueError:
        return False


def fits(found: Any, schema: dict[str, Any]) -> bool:
    """Validate against the part of JSON Schema that records use: types, enum, and objects with exactly their fields."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(KINDS[kind](found) for kind in kinds) or found not in schema.get("enum", [found]):
        return False
    if isinstance(found, list):
        return all(fits(each, schema["items"]) for each in found)
    if isinstance(found, dict):
        return found.keys() == schema["properties"].keys() and all(
            fits(found[key], part) for key, part in schema["properties"].items()
        )
    return True


KINDS: dict[str, Callable[[Any], bool]] = {
    "string": lambda found: isinstance(found, str),
    "boolean": lambda found: isinstance(found, bool),
    "null": lambda found: found is None,
    "integer": lambda found: isinstance(found, int) and not isinstance(found, bool),
    "number": lambda found: isinstance(found, (int, float)) and not isinstance(found, bool),
    "array": lambda found: isinstance(found, list),
    "object": lambda found: isinstance(found, dict),
}


def chart(answers: list[Answer]) -> Chart:
    places = [PLAIN, BOUND, DRAWN, BOUND_DRAWN]
    series = {
        "valid": [value(score(validity(answers), name)) for name in places],
        "score": [value(score(answers, name)) for name in places],
    }
    return Chart("Records with and without their schema", "", "share", places, series, bars=True)
