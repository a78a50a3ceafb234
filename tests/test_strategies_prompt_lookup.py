"""Prompt lookup against the law of its trees, and wrong variants against the same check."""
from __future__ import annotations

from random import Random

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from playground.contract import Drafter, find
from support.speculation_oracles import NAMES, assert_refused


def check_prompt_lookup(drafter: type[Drafter]) -> None:
    chance, end = Random(0), 4
    for _ in range(300):
        text = [chance.randrange(5) for _ in range(chance.randrange(2, 16))]
        n_max, count = chance.randrange(1, 5), chance.randrange(1, 6)
        library = PromptLookupCandidateGenerator(torch.tensor([end]), count, n_max, max_length=1000)
        expected = library.get_candidates(torch.tensor([text]))[0][0, len(text):].tolist()
        assert drafter(n_max=n_max).look_up(text, count, lambda token: token == end) == expected


class PrefersShortEndings(find("prompt_lookup")):
    def look_up(self, text, count, ends=lambda token: False):
        found = (type(self).__base__(n_max=n, n_min=n).look_up(text, count, ends) for n in range(1, self.n_max + 1))
        return next(filter(None, found), [])


class TakesTheLatest(find("prompt_lookup")):
    def _find(self, text, n, count):
        return next((i for i in reversed(range(len(text) - n)) if text[i:i + n] == text[-n:]), None)


class GuessesTheEnd(find("prompt_lookup")):
    """Does not stop before a token that ends the text."""

    def look_up(self, text, count, ends=lambda token: False):
        return super().look_up(text, count)


@pytest.mark.oracle("prompt_lookup")
def test_prompt_lookup_proposes_what_the_library_proposes():
    check_prompt_lookup(find("prompt_lookup"))


@pytest.mark.refuses("prompt_lookup")
@pytest.mark.parametrize("wrong", [PrefersShortEndings, TakesTheLatest, GuessesTheEnd], ids=NAMES)
def test_a_wrong_lookup_differs_from_the_library(wrong):
    assert_refused(check_prompt_lookup, wrong)
