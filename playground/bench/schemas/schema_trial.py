"""Tests one schema: compiles it, writes texts constrained by it, validates them, and times the token masks."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from playground.bench.schemas.cases import Case
from playground.bench.schemas.independent_validator import Judge, Validity
from playground.bench.schemas.random_writer import RandomWriter
from playground.contract import make
from playground.engine.sampling import REMOVED
from playground.errors import Refusal
from playground.grammar.schema.source import understood
from playground.lane_fields import LaneConfig
from playground.trace.result import Result

if TYPE_CHECKING:
    from playground.decoding.models import Models
    from playground.grammar.matcher import Grammar

OUTCOMES = ("refused", "valid", "invalid", "cut off", "unchecked")
SHOWN, ROOM = 400, 64  # maximum characters of the schema in the prompt, and tokens reserved for the rest of the prompt
MOST = 200  # tokens of a random text


class MaskTime(NamedTuple):
    """Seconds of one token mask: computing the bitmask, unpacking it to a tensor, and applying it to scores."""

    compute: float
    unpack: float
    apply: float

    @property
    def whole(self) -> float:
        return self.compute + self.unpack + self.apply


class WrittenInstance(NamedTuple):
    """A text constrained by the schema, and its validity."""

    by: str
    text: str
    verdict: Validity


@dataclass
class SchemaResult:
    """Everything measured for one schema."""

    case: Case
    refusal: str = ""
    compile_seconds: float = 0.0
    masks: list[MaskTime] = field(default_factory=list)
    writings: list[WrittenInstance] = field(default_factory=list)
    forbidden: list[str] = field(default_factory=list)  # valid instances that the grammar rejects
    let_through: list[str] = field(default_factory=list)  # invalid instances that the grammar accepts

    @property
    def violations(self) -> list[str]:
        """Texts and instances that were accepted although they violate the schema."""
        broken = [writing for writing in self.writings if writing.verdict.outcome in ("invalid", "no JSON")]
        return [
            f"{writing.by} wrote {writing.text[:80]!r}: {writing.verdict.reason}" for writing in broken
        ] + self.let_through

    @property
    def outcome(self) -> str:
        """One of OUTCOMES."""
        if self.refusal:
            return "refused"
        if self.violations:
            return "invalid"
        known = {writing.verdict.outcome for writing in self.writings}
        return next((outcome for outcome in ("valid", "unchecked") if outcome in known), "cut off")

    @property
    def reason(self) -> str:
        """Why the outcome is not "valid"; empty if it is."""
        if self.outcome == "valid":
            return ""
        reasons = [self.refusal, *self.violations, *(writing.verdict.reason for writing in self.writings)]
        return next((reason for reason in reasons if reason), "")


@dataclass
class SchemaTrial:
    """Tests schemas with one model. `most`: maximum tokens of the model's texts. `scribbles`: random texts per schema.
    """

    models: Models
    most: int = 64
    scribbles: int = 4
    seed: int = 0

    def __post_init__(self):
        target = self.models.target
        self.tokens, self.engine = target.tokens, target.grammars
        self.random_writer = RandomWriter(target.tokens, target.vocabulary)
        self.scores = torch.zeros(target.vocabulary)

    def try_all(self, cases: list[Case]) -> Iterator[SchemaResult]:
        for case in cases:
            yield self.try_one(case)

    def try_one(self, case: Case) -> SchemaResult:
        result, judge, start = SchemaResult(case), Judge(_read(case)), perf_counter()
        try:
            grammar = self.engine.compile(*make("json_schema", source=case.source).grammar())
        except Refusal as refusal:
            result.refusal = str(refusal)
            return result
        finally:
            result.compile_seconds = perf_counter() - start
        for by, ids in self._written(case, grammar):
            text = b"".join(map(self.tokens.bytes, ids)).decode(errors="replace")
            complete = self._match(grammar, ids, result.masks)
            validity = judge(text) if complete else Validity("cut off", f"cut off after {len(ids)} tokens")
            result.writings.append(WrittenInstance(by, text, validity))
        self._match_instances(grammar, result)
        return result

    def _written(self, case: Case, grammar: Grammar) -> Iterator[tuple[str, list[int]]]:
        """Author and token ids of each text."""
        yield "the model", self._model_writes(case)
        for number in range(self.scribbles):
            ids = self.random_writer.write(grammar.matcher(), self.seed + number, MOST)
            if ids is not None:
                yield f"scribble {number + 1}", ids

    def _model_writes(self, case: Case) -> list[int]:
        from playground.decoding.limits import Limits
        from playground.decoding.prompt import Prompt
        from playground.decoding.session import prepare
        # one token per character at most
        shown = case.source[:max(0, min(SHOWN, self.models.target.context - self.most - ROOM))]
        prompt = Prompt(f"Write JSON for this schema: {shown}", bool(self.models.target.tokenizer.chat_template))
        session = prepare(
            self.models,
            [LaneConfig("greedy", {}, [("json_schema", {"source": case.source})])],
            prompt,
            Limits(self.seed, self.most),
        )
        while not session.finished:
            session.advance()
        return [id for id in Result(session.trace).token_ids if id not in self.models.target.end_ids]

    def _match(self, grammar: Grammar, ids: list[int], times: list[MaskTime]) -> bool:
        """Time the mask before each token and at the end; returns whether the text may end there."""
        matcher = grammar.matcher()
        for token in ids:
            times.append(self._time(matcher))
            matcher.advance(token)
        times.append(self._time(matcher))
        return matcher.accepting

    def _time(self, matcher: Any) -> MaskTime:
        start = perf_counter()
        bits = matcher.bitmask()
        computed = perf_counter()
        mask = matcher.unpack(bits)
        unpacked = perf_counter()
        self.scores.masked_fill(~mask, REMOVED)
        return MaskTime(computed - start, unpacked - computed, perf_counter() - unpacked)

    def _match_instances(self, grammar: Grammar, result: SchemaResult) -> None:
        for instance in result.case.instances:
            accepted = any(self._accepts(grammar, text) for text in spellings(instance.data, result.case.schema))
            if accepted and not instance.valid:
                result.let_through.append(f"{instance.description}: {json.dumps(instance.data)[:80]} was accepted")
            if instance.valid and not accepted:
                result.forbidden.append(instance.description)

    def _accepts(self, grammar: Grammar, text: str) -> bool:
        matcher = grammar.matcher()
        return all(matcher.advance(token) for token in self.tokens.encode_continuation(text)) and matcher.accepting


def _read(case: Case) -> Any:
    """The schema of a case without what is around it, as the constraint reads it."""
    try:
        return understood(case.schema).schema
    except Refusal:
        return case.schema


def spellings(data: Any, schema: Any) -> list[str]:
    """Data as JSON with its keys in the given order, and in the schema's order, which the engine requires."""
    return list(dict.fromkeys(json.dumps(form, ensure_ascii=False) for form in (data, ordered(data, schema))))


def ordered(data: Any, schema: Any) -> Any:
    if isinstance(data, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [ordered(item, items) for item in data]
    if not isinstance(data, dict) or not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
        return data
    named = list(dict.fromkeys([*schema.get("properties", {}), *schema.get("required", [])]))
    keys = [name for name in named if name in data] + [name for name in data if name not in named]
    return {key: ordered(data[key], schema.get("properties", {}).get(key)) for key in keys}
