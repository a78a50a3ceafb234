"""Two grammar engines are compared position by position; the other engine here is ours, with changes of its own."""
from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from pairs import pair

from playground.bench.engines.engine_trial import OURS, EngineComparison, EngineTrial
from playground.bench.engines.engines_report import (
    difference_rows,
    document,
    instance_rows,
    mask_rows,
    page,
    time_rows,
    verdict_rows,
)
from playground.bench.engines.grammar_sources import GrammarSource, grammar_sources
from playground.bench.engines.xgrammar_engine import XGrammarEngine
from playground.errors import Refusal

pytestmark = pytest.mark.bench
TARGET = pair().target
DIGITS = GrammarSource("regex", "digits", "[0-9]{3}")
INTEGER = GrammarSource("json_schema", "integer", '{"type": "integer"}', ((("12",), True), (('"a"',), False)))


class Other:
    """Our engine under another name, which reads another source."""

    name = "other"

    def __init__(self, changed: dict[str, str] | None = None):
        self.changed = changed or {}

    def compile(self, kind, source):
        return TARGET.grammars.compile(kind, self.changed.get(source, source))


def compared(source: GrammarSource, to: str | None = None) -> EngineComparison:
    """A comparison with an engine that reads another source, if one is given."""
    return EngineTrial(TARGET, Other({source.text: to} if to else {}), 3).compare(source)


def test_an_engine_that_reads_the_same_has_the_same_masks_everywhere():
    for source in (DIGITS, INTEGER):
        found = compared(source)
        assert found.equal == found.positions > 4 and not found.differences
        assert all(len(result.mask_seconds) == found.positions for result in found.by_engine.values())


def test_what_only_one_engine_allows_is_found_with_the_text_before_it():
    found = compared(DIGITS, to="[0-8]{3,4}")
    only = {(difference.what, difference.only) for difference in found.differences}
    assert found.different and only <= {("9", OURS), ("the end", OURS), *((digit, "other") for digit in "012345678")}
    assert ("9", OURS) in only
    assert {difference.text for difference in found.differences if difference.what == "9"} == {""}


def test_instances_are_counted_by_engine():
    by_engine = compared(INTEGER, to='{"type": "string"}').by_engine
    counts = {name: (result.forbidden, result.let_through) for name, result in by_engine.items()}
    assert counts == {OURS: (0, 0), "other": (1, 1)}


def test_a_grammar_that_one_engine_refuses_is_not_compared():
    found = compared(DIGITS, to="((")
    assert found.by_engine["other"].refusal and not found.by_engine[OURS].refusal and not found.positions
    assert verdict_rows([found])[1][:2] == ["digits", "other"]


def test_the_tables_and_the_page_show_every_count():
    found = [compared(DIGITS, to="[0-8]{3}"), compared(INTEGER)]
    (_, *first), (_, *second) = mask_rows(found)[1:]
    assert first == ["1", "0", "0", *map(str, (found[0].positions, found[0].equal, 0, 0, found[0].different, 1))]
    assert second[-1] == "0" and len(time_rows(found)) == 5 and instance_rows(found)[1] == [OURS, "2", "0", "0"]
    assert difference_rows(found)[1][:5] == ["regex", OURS, "'9'", "1", "digits"]
    facts = {"settings": {"seed": 0}, "machine": {"cores": 2}}
    assert "Of 2 grammars both engines accept 2; 1 of these" in page(facts, found)
    read = json.loads(json.dumps(document(facts, found)))
    assert [grammar["different"] for grammar in read["grammars"]] == [found[0].different, 0]


def test_the_bundled_grammars_compile_with_ours():
    for source in grammar_sources([]):
        found = EngineTrial(TARGET, Other(), 0).compare(replace(source, instances=()))
        assert not found.by_engine[OURS].refusal, source.name


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(Refusal, match="pip install xgrammar"):
        XGrammarEngine(TARGET)


def test_xgrammar_agrees_on_a_pattern():
    pytest.importorskip("xgrammar")
    found = EngineTrial(TARGET, XGrammarEngine(TARGET), 2).compare(DIGITS)
    assert found.positions and not found.different
