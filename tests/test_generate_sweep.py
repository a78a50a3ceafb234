"""Greedy lanes write what `generate` writes, for tokenizers, chat templates, ends and stored forms of checkpoints."""
import pytest
from generate_sweep import FORMS, NETWORKS, TEMPLATES, Case, cases, loosely, sweep

from playground.engine.text.tokens import Tokens
from support.tokenizer_kinds import KINDS

EVERY = 67  # of three thousand cases


def differences(asked: list[Case]) -> list[tuple[Case, list[str]]]:
    found = sweep(asked, lambda name: KINDS[name]())
    return [(case, one.differences) for case, one in found if one.differences or "refused" in str(one.excused)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_cases_agrees_with_the_library(kind):
    asked = cases(KINDS, TEMPLATES, (*FORMS, *NETWORKS), EVERY)
    assert not differences([case for case in asked if case.tokenizer == kind])


@pytest.mark.long
def test_all_cases_agree_with_the_library():
    assert not differences(cases(KINDS, TEMPLATES, (*FORMS, *NETWORKS)))


def test_the_sample_meets_each_choice():
    asked = cases(KINDS, TEMPLATES, (*FORMS, *NETWORKS), EVERY)
    assert len({case.form for case in asked}) == len(FORMS) + len(NETWORKS)
    assert len({(case.tokenizer, case.template) for case in asked}) > len(KINDS) * 2


def test_a_lane_that_decodes_its_text_alone_is_found(monkeypatch):
    """The wrong variant: the first space of the answer is lost."""
    has_text = Tokens.has_text
    monkeypatch.setattr(Tokens, "has_text", lambda self, ids: len(ids) == 1 and has_text(self, ids))
    (_, found), = differences([Case("llama2", "none", "config", "float32")])
    assert found[0].startswith("text ")


def test_only_stray_bytes_are_compared_loosely():
    assert loosely("a\ufffd\ufffdb").fullmatch("aA\ufffdb")
    assert not loosely("a\ufffd\ufffdb").fullmatch("aA\ufffdBb")
    assert not loosely("a b").fullmatch("ab")
