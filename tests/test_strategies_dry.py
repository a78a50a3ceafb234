"""DRY against the rule by hand, and wrong variants against the same check."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from registry import Collapse
from tables import TableModel

from playground.algorithms.sampling.repetition import parse_marks, repeat_lengths
from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from support.penalties import alone, apply, notes, run, spans, texts
from support.repeating_texts import V, applied, repeating, scores_for
from support.wrong_variants import refused

DRY = find("dry")
BREAKER = 5  # the last letter


def dry_by_definition(text: list[int], allowed: int, breaker: int | None) -> list[float]:
    """Penalties [V]: from every earlier position of the last token, how far back the text agrees with its end."""
    longest = [0] * V
    for i in range(len(text) - 1):
        length = 0
        while length <= i and text[i - length] == text[-1 - length] != breaker:
            length += 1
        if text[i + 1] != breaker:
            longest[text[i + 1]] = max(longest[text[i + 1]], length)
    return [0.8 * 1.75 ** (length - allowed) if length >= allowed else 0.0 for length in longest]


def check_dry(cls: type[Sampler]) -> None:
    cases = [*repeating(), *repeating(letters=2, seed=1), *repeating(letters=V, longest=40, seed=2), [0, 1, 5, 2] * 4]
    for number, text in enumerate(cases):
        for allowed, breakers, breaker in ((1, "", None), (2, "f", BREAKER), (3, "", None)):
            scores = scores_for(number)
            found = applied(cls, text, scores, multiplier=0.8, base=1.75, allowed=allowed, breakers=breakers)
            penalties = dry_by_definition(text, allowed, breaker)
            assert found == pytest.approx((scores - torch.tensor(penalties, dtype=torch.float64)).tolist())


class CountsTheTokenItself(DRY):
    def penalty(self, length):
        return super().penalty(length + 1)


class StartsOneLater(DRY):
    def repeats(self, history):
        return {token: length for token, length in super().repeats(history).items() if length > self.allowed}


class ReachesAcrossBreakers(DRY):
    def _unbroken(self, history):
        return len(history)


class PunishesBreakers(DRY):
    """Breaks repeats at breakers, but penalises breakers themselves."""

    def repeats(self, history):
        unbroken, self._breaks = self._unbroken(history), lambda token: False
        self._unbroken = lambda searched: unbroken
        return super().repeats(history)


@pytest.mark.oracle("dry")
def test_dry_penalises_a_repeat_by_its_length():
    check_dry(DRY)


@pytest.mark.refuses("dry")
@pytest.mark.parametrize("wrong", [CountsTheTokenItself, StartsOneLater, ReachesAcrossBreakers, PunishesBreakers])
def test_a_wrong_dry_is_refused(wrong):
    refused(check_dry, wrong)


GREEDY = LaneConfig("greedy")
COLLAPSES = {
    "dry": [
        Collapse(alone("dry", multiplier=0.0), GREEDY),
        Collapse(alone("dry", multiplier=5.0, window=2, allowed=2), GREEDY),
    ],
}


# --- DRY ---

def dry_penalties(
    text: list[int], size: int, breakers: set[int], multiplier: float = 0.8, base: float = 1.75, allowed: int = 2
) -> list[float]:
    """By its definition: every earlier position of the last token, and how far back both agree."""
    longest = {}
    for i in range(len(text) - 1):
        if text[i] != text[-1] or text[-1] in breakers or text[i + 1] in breakers:
            continue
        length = 0
        while (
            length <= i and length < 50 and text[i - length] == text[-1 - length] and text[i - length] not in breakers
        ):
            length += 1
        longest[text[i + 1]] = max(length, longest.get(text[i + 1], 0))
    return [multiplier * base ** (longest[v] - allowed) if longest.get(v, 0) >= allowed else 0.0 for v in range(size)]


@pytest.mark.oracle("dry")
@pytest.mark.parametrize("allowed", [1, 2, 4])
@pytest.mark.parametrize("breakers", ["", "d", "a c"])
def test_continued_repetition_is_penalised_by_its_length(allowed, breakers):
    punished = 0
    for text in [*texts(100), *texts(100, letters=2), [0] * 80, [3, 1] * 60]:
        expected = dry_penalties(text, 4, {ord(letter) - ord("a") for letter in breakers.split()}, allowed=allowed)
        found = apply("dry", torch.zeros(4, dtype=torch.float64), text, allowed=allowed, breakers=breakers)
        assert found.tolist() == pytest.approx([-penalty for penalty in expected])
        punished += any(expected)
    assert punished > 20 or breakers == "a c"


def test_worked_example_a_repeat_of_three_tokens_costs_the_base_once():
    found = apply("dry", torch.zeros(5, dtype=torch.float64), [0, 1, 2, 3, 0, 1, 2])
    assert found.tolist() == pytest.approx([0, 0, 0, -1.4, 0])


def test_a_window_excludes_the_first_occurrence_of_a_repeat():
    assert apply("dry", torch.zeros(5), [0, 1, 2, 3, 0, 1, 2], window=6).tolist() == pytest.approx([0, 0, 0, -0.8, 0])
    assert not apply("dry", torch.zeros(5), [0, 1, 2, 3, 0, 1, 2], window=4).any()


def test_a_token_that_contains_a_breaker_breaks_repeats():
    sampler = make("dry")
    sampler.begin(0, lambda token: ["a", "b", ".\n", "c:", "d"][token])
    assert sampler.apply(torch.zeros(1, 5), [[0, 1, 4, 0, 1]])[0].tolist() == pytest.approx([0, 0, 0, 0, -0.8])
    assert not sampler.apply(torch.zeros(1, 5), [[0, 2, 1, 4, 0, 2, 1]])[0].any()  # only one token since the line break
    assert not sampler.apply(torch.zeros(1, 5), [[0, 1, 3, 0, 1]])[0].any()  # the next token would be a breaker itself


def test_breakers_are_separated_by_spaces():
    assert parse_marks('\\n : "') == ("\n", ":", '"') and parse_marks("  ") == ()


def test_a_looping_text_leaves_its_loop_and_the_reader_is_informed():
    def rule(context):  # abc abc abc: each letter is followed by the next one, and d is a little less likely
        return torch.tensor([4.0 * ((context[-1] + 1) % 3 == token) for token in range(3)] + [3.0], dtype=torch.float64)

    model = TableModel("abcd", rule=rule)
    assert run(GREEDY, model, [0, 1, 2], 9)[0] == [0, 1, 2] * 3
    written, events = run(alone("dry"), model, [0, 1, 2], 9)
    # "abc" is repeated for 0.80, but going on to the next a costs 1.40 of the 4 - 3 that speak for it
    assert written[:4] == [0, 1, 2, 3]
    assert spans(events, "penalised repeats")[:2] == [[2, 3, "abc", 0.8], [3, 4, "abca", pytest.approx(1.4)]]
    assert notes(events)[0] == ("'a' would have repeated 'abca': its score was lowered by 1.40, "
                                "and 'd' was chosen instead.")


# --- wrong variants ---

def counts_the_token_itself(text: list[int]) -> list[float]:
    return [
        0.8 * 1.75 ** (length + 1 - 2) if length + 1 >= 2 else 0.0
        for length in (repeat_lengths(text).get(v, -1) for v in range(4))
    ]


def punishes_the_first_place_only(text: list[int]) -> list[float]:
    first = text[:-1].index(text[-1]) if text and text[-1] in text[:-1] else None
    whole = dry_penalties(text, 4, set())
    return [penalty if first is not None and text[first + 1] == v else 0.0 for v, penalty in enumerate(whole)]


def grows_by_the_allowed_length(text: list[int]) -> list[float]:
    return [penalty * 1.75 ** 2 for penalty in dry_penalties(text, 4, set())]


WRONG_DRY = [counts_the_token_itself, punishes_the_first_place_only, grows_by_the_allowed_length]


@pytest.mark.refuses("dry")
@pytest.mark.parametrize("wrong", WRONG_DRY)
def test_a_wrong_dry_is_detected(wrong: Callable):
    right = [[-x for x in apply("dry", torch.zeros(4, dtype=torch.float64), text).tolist()] for text in texts()]
    assert any(found != pytest.approx(wrong(text)) for found, text in zip(right, texts()))
