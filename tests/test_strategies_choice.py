"""Choice list against all texts of its language, and wrong variants against the same check."""
from __future__ import annotations

import pytest

from playground.contract import Constraint, find
from playground.grammar.matcher import GrammarEngine
from support.languages import byte_engine, language  # noqa: F401 - a fixture
from support.wrong_variants import refused

Choice = find("choice")


def check_choice(cls: type[Constraint], engine: GrammarEngine) -> None:
    for options in ("red|green|greenish", "a.b|a*|(", "Größe|größe|日本", "x", "yes| yes|no ", " a"):
        assert language(engine, cls(options)) == set(options.split("|"))


class ReadsOptionsAsPatterns(Choice):
    def grammar(self):
        return "regex", self.options.replace("(", r"\(")


class ForgetsTheCase(Choice):
    def grammar(self):
        return "choice", self.options.lower()


class StripsItsOptions(Choice):
    def grammar(self):
        return "choice", "|".join(option.strip() for option in self.options.split("|"))


class LosesTheLastOption(Choice):
    def grammar(self):
        return "choice", self.options.rpartition("|")[0] or self.options


@pytest.mark.oracle("choice")
def test_a_choice_accepts_exactly_its_options(byte_engine):
    check_choice(Choice, byte_engine)


@pytest.mark.refuses("choice")
@pytest.mark.parametrize("wrong", [ReadsOptionsAsPatterns, ForgetsTheCase, StripsItsOptions, LosesTheLastOption])
def test_a_wrong_choice_is_refused(byte_engine, wrong):
    refused(check_choice, wrong, byte_engine)
