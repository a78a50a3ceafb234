"""Regular expression against all texts of its language, and wrong variants against the same check."""
from __future__ import annotations

import re

import pytest

from playground.contract import Constraint, find
from playground.grammar.matcher import GrammarEngine
from support.languages import byte_engine, language, spelled  # noqa: F401 - a fixture
from support.wrong_variants import refused

Regex = find("regex")


def check_regex(cls: type[Constraint], engine: GrammarEngine) -> None:
    for pattern in ("(ab|b{1,2})a?", "a|ab|abb", "[ab]{0,2}b", "b(?:a?b){1,2}"):
        expected = {text for text in spelled("ab", 7) if re.fullmatch(pattern, text)}
        assert language(engine, cls(pattern)) == expected


class MatchesTheBeginning(Regex):
    def grammar(self):
        return "regex", f"(?:{self.pattern})[ab]?"


class LeavesOptionalPartsOut(Regex):
    def grammar(self):
        return "regex", self.pattern.replace("?:", "$").replace("?", "{0}").replace("$", "?:")


@pytest.mark.oracle("regex")
def test_a_regex_accepts_exactly_what_re_matches(byte_engine):
    check_regex(Regex, byte_engine)


@pytest.mark.refuses("regex")
@pytest.mark.parametrize("wrong", [MatchesTheBeginning, LeavesOptionalPartsOut])
def test_a_wrong_regex_is_refused(byte_engine, wrong):
    refused(check_regex, wrong, byte_engine)
