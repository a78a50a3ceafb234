"""Compares the masks of two engines on one grammar."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from playground.bench.engines.grammar_sources import GrammarSource
from playground.bench.schemas.random_writer import RandomWriter
from playground.contract import make
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.engine.model import Model

OURS = "llguidance"
MOST = 100  # tokens of a random text
TRIED = 200  # tokens of a mask that llguidance omits, of which it is asked whether they are valid


class OtherEngine(Protocol):
    """Another engine: its grammars have `matcher()`, with bitmask, mask, advance, accepting, stopped and ends."""

    name: str

    def compile(self, kind: str, source: str) -> Any:
        """A compiled grammar; raises Refusal."""


class MaskDifference(NamedTuple):
    """What only one engine allows after a text, the first such text of a grammar: a token, or the end."""

    text: str
    what: str
    only: str  # name of the engine


@dataclass
class EngineResult:
    """What one engine did with a grammar."""

    refusal: str = ""
    compile_seconds: float = 0.0
    mask_seconds: list[float] = field(default_factory=list)
    forbidden: int = 0  # valid instances that it rejects
    let_through: int = 0  # invalid instances that it accepts


@dataclass
class EngineComparison:
    """A grammar in both engines. Positions of the texts by outcome: `equal` masks; `canonical` ones, which differ only
    in other tokenisations of what is forced, omitted by llguidance; `special` ones, which differ only in special
    tokens, which one engine reads as text; and `different` ones.
    """

    source: GrammarSource
    by_engine: dict[str, EngineResult]
    equal: int = 0
    canonical: int = 0
    special: int = 0
    different: int = 0
    differences: list[MaskDifference] = field(default_factory=list)

    @property
    def positions(self) -> int:
        return self.equal + self.canonical + self.special + self.different


class EngineTrial:
    """Compares grammars with the tokens of one model. `scribbles`: random texts per grammar and engine."""

    def __init__(self, target: Model, other: OtherEngine, scribbles: int = 4, seed: int = 0):
        self.tokens, self.ours, self.other = target.tokens, target.grammars, other
        self.scribbles, self.seed, self.end_ids = scribbles, seed, sorted(target.end_ids)
        special = {token for token in range(target.vocabulary) if target.tokens.is_special(token)}
        self.control_ids, self.special_ids = sorted(special.union(self.end_ids)), sorted(special - {*self.end_ids})
        self.writer = RandomWriter(target.tokens, target.vocabulary)

    def compare(self, source: GrammarSource) -> EngineComparison:
        result = EngineComparison(source, {OURS: EngineResult(), self.other.name: EngineResult()})
        ours = self._compiled(result, OURS, lambda: self.ours.compile(*self._ours(source)))
        theirs = self._compiled(result, self.other.name, lambda: self.other.compile(source.kind, source.text))
        for name, grammar in ((OURS, ours), (self.other.name, theirs)):
            if grammar:
                self._match_instances(source, grammar, result.by_engine[name])
        if ours and theirs:
            for ids in self._texts(ours, theirs):
                self._follow(result, ids, ours.matcher(), theirs.matcher())
        return result

    def _ours(self, source: GrammarSource) -> tuple[str, str]:
        knob = {"json_schema": "source", "regex": "pattern", "gbnf": "source"}.get(source.kind)
        return make(source.kind, **{knob: source.text}).grammar() if knob else (source.kind, source.text)

    def _compiled(self, result: EngineComparison, name: str, build: Callable[[], Any]) -> Any:
        engine, start = result.by_engine[name], perf_counter()
        try:
            return build()
        except Refusal as refusal:
            engine.refusal = str(refusal)
            return None
        finally:
            engine.compile_seconds = perf_counter() - start

    def _texts(self, ours: Any, theirs: Any) -> Iterator[list[int]]:
        """Token ids of random texts under the masks of either engine; texts that do not end are omitted."""
        for grammar in (ours, theirs):
            for number in range(self.scribbles):
                if (ids := self.writer.write(grammar.matcher(), self.seed + number, MOST)) is not None:
                    yield ids

    def _follow(self, result: EngineComparison, ids: list[int], ours: Any, theirs: Any) -> None:
        """Compare the masks at every position of a text, as far as both engines accept it."""
        for place in range(len(ids) + 1):
            text = b"".join(map(self.tokens.bytes, ids[:place])).decode(errors="replace")
            self._compare_masks(result, text, ours, theirs)
            if place == len(ids):
                return
            accepted = {OURS: ours.advance(ids[place]), self.other.name: theirs.advance(ids[place])}
            if not all(accepted.values()):
                return

    def _compare_masks(self, result: EngineComparison, text: str, ours: Any, theirs: Any) -> None:
        masks = []
        for name, matcher in ((OURS, ours), (self.other.name, theirs)):
            start = perf_counter()
            matcher.bitmask()
            result.by_engine[name].mask_seconds.append(perf_counter() - start)
            masks.append(matcher.mask())
        found = list(self._differences(text, *masks, ours))
        if found:
            result.different += 1
            known = {(each.what, each.only) for each in result.differences}
            result.differences += [each for each in found[:1] if (each.what, each.only) not in known]
        elif (masks[0] != masks[1])[self.special_ids].any():
            result.special += 1
        elif self._omitting(masks[0] != masks[1], self.end_ids).any():
            result.canonical += 1
        else:
            result.equal += 1

    def _differences(self, text: str, mine: Tensor, others: Tensor, ours: Any) -> Iterator[MaskDifference]:
        """The end, and the tokens without special ones, that only one engine allows."""
        if bool(mine[self.end_ids].any()) != bool(others[self.end_ids].any()):
            yield MaskDifference(text, "the end", OURS if mine[self.end_ids].any() else self.other.name)
        for token in self._omitting(mine & ~others, self.control_ids).nonzero()[:, 0].tolist():
            yield MaskDifference(text, self.tokens.piece(token), OURS)
        for token in self._omitting(others & ~mine, self.control_ids).nonzero()[:TRIED, 0].tolist():
            if not ours.allows(token):
                yield MaskDifference(text, self.tokens.piece(token), self.other.name)

    def _omitting(self, mask: Tensor, tokens: list[int]) -> Tensor:
        return mask.index_fill(0, torch.tensor(tokens, dtype=torch.long), False)

    def _match_instances(self, source: GrammarSource, grammar: Any, result: EngineResult) -> None:
        for texts, valid in source.instances:
            accepted = any(self._accepts(grammar, text) for text in texts)
            result.let_through += accepted and not valid
            result.forbidden += valid and not accepted

    def _accepts(self, grammar: Any, text: str) -> bool:
        matcher = grammar.matcher()
        return all(matcher.advance(token) for token in self.tokens.encode_continuation(text)) and matcher.accepting
