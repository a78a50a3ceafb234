"""Repetition: penalties, forbidden n-grams, DRY and momentum, against the library and independent counts."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from registry import Collapse
from tables import TableModel
from transformers import NoRepeatNGramLogitsProcessor

from playground.algorithms.sampling.repetition import last_tokens, parse_marks, repeat_lengths
from playground.contract import make
from playground.contract.lane_config import LaneConfig
from support.penalties import alone, apply, ngrams, notes, repeat, run, spans, texts

GREEDY = LaneConfig("greedy")
COLLAPSES = {
    "frequency_penalty": [Collapse(alone("frequency_penalty", penalty=0.0), GREEDY)],
    "presence_penalty": [
        Collapse(alone("presence_penalty", penalty=0.0), GREEDY),
        Collapse(alone("presence_penalty", penalty=1.5, window=1), alone("frequency_penalty", penalty=1.5, window=1)),
    ],
    "no_repeat_ngram": [Collapse(alone("no_repeat_ngram", n=0), GREEDY)],
    "dry": [
        Collapse(alone("dry", multiplier=0.0), GREEDY),
        Collapse(alone("dry", multiplier=5.0, window=2, allowed=2), GREEDY),
    ],
    "momentum": [
        Collapse(alone("momentum", alpha=0.0), GREEDY),
        Collapse(alone("momentum", k=1), GREEDY),
        Collapse(alone("momentum", alpha=1.0, resistance="0 0 0"), GREEDY),
        *(
            Collapse(alone("momentum", k=50, alpha=1.0, resistance=f"{'0 ' * (n - 1)}2"), alone("no_repeat_ngram", n=n))
            for n in (3, 4, 5)
        ),
    ],
}


# --- how long a repeat is ---

def test_a_tokens_repeat_is_the_longest_earlier_ngram_it_would_complete():
    for text in texts():
        for longest in (0, 1, 2, 4, 99):
            found = repeat_lengths(text, longest)
            assert found.keys() == set(text)
            assert all(length + 1 == repeat(text, token, longest + 1) for token, length in found.items())


@pytest.mark.parametrize(
    "text, found",
    [
        ([1, 2, 3, 7, 1, 2, 3], {7: 3, 1: 0, 2: 0, 3: 0}),
        ([5, 5], {5: 1}),
        ([5], {5: 0}),
        ([], {}),
        ([1, 2, 1, 2, 1], {2: 3, 1: 0}),
    ],
)
def test_worked_examples_of_repeats(text, found):
    assert repeat_lengths(text) == found


def test_a_window_longer_than_the_text_is_the_whole_text():
    text = [1, 2, 3, 4, 5]
    assert [
        last_tokens(text, 0, 0),
        last_tokens(text, 2, 0),
        last_tokens(text, 0, 2),
        last_tokens(text, 4, 3),
        last_tokens(text, 5, 3),
        last_tokens(text, 0, 9),
    ] == [text, [3, 4, 5], [4, 5], [5], [], text]


# --- frequency and presence ---

def counted(history: list[int], start: int, window: int, prompt: bool) -> list[int]:
    places = range(0 if prompt else start, len(history))
    return [history[i] for i in places if not window or i >= len(history) - window]


@pytest.mark.oracle("frequency_penalty", "presence_penalty")
@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("prompt", [False, True])
def test_scores_fall_with_every_occurrence_or_once(window, prompt):
    for text in texts(60, letters=6):
        # the sixth letter has no row: the text may know more tokens
        start, scores = len(text) // 2, torch.arange(5, dtype=torch.float64)
        seen = counted(text, start, window, prompt)
        knobs = {"window": window, "prompt": prompt, "start": start}
        assert apply("frequency_penalty", scores, text, penalty=0.7, **knobs).tolist() == pytest.approx(
            [v - 0.7 * seen.count(v) for v in range(5)]
        )
        assert apply("presence_penalty", scores, text, penalty=0.7, **knobs).tolist() == pytest.approx(
            [v - 0.7 * (v in seen) for v in range(5)]
        )


def test_a_removed_token_stays_removed_whatever_is_added():
    scores = torch.tensor([-math.inf, 1.0, 2.0])
    for name in ("frequency_penalty", "presence_penalty"):
        assert apply(name, scores, [0, 0, 1], penalty=-2.0)[0] == -math.inf


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_the_prompt_counts_only_on_request(name):
    model = TableModel("abc", rule=lambda context: torch.tensor([1.0, 0.8, 0.5], dtype=torch.float64))
    assert run(alone(name, penalty=0.25), model, [0, 0, 0], 2)[0] == [0, 1]
    assert run(alone(name, penalty=0.25, prompt=True), model, [0, 0, 0], 2)[0][0] == 1


# --- forbidden n-grams ---

@pytest.mark.oracle("no_repeat_ngram")
@pytest.mark.parametrize("n", range(1, 9))
def test_rows_of_no_repeat_ngram_equal_the_librarys(n):
    processor = NoRepeatNGramLogitsProcessor(n)
    for text in texts(150, letters=3 if n > 2 else 30, longest=30):
        if text:
            scores = torch.arange(40, dtype=torch.float32)
            assert torch.equal(
                apply("no_repeat_ngram", scores, text, n=n), processor(torch.tensor([text]), scores[None])[0]
            )


def test_worked_example_the_token_that_completes_the_trigram_is_removed():
    found = apply("no_repeat_ngram", torch.zeros(5), [0, 1, 2, 3, 0, 1, 2], n=3)
    assert found.tolist() == [0, 0, 0, -math.inf, 0]


def test_if_all_tokens_would_be_removed_the_row_is_unchanged():
    scores = torch.tensor([1.0, 2.0, -math.inf])
    assert torch.equal(apply("no_repeat_ngram", scores, [0, 1], n=1), scores)
    assert apply("no_repeat_ngram", scores, [1, 1], n=1).tolist() == [1.0, -math.inf, -math.inf]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_no_ngram_occurs_twice_while_there_is_an_alternative(n):
    model = TableModel("abcdefghijklmnopqrstuvwx", rule=lambda context: torch.arange(24, 0, -1, dtype=torch.float64))
    written, events = run(alone("no_repeat_ngram", n=n), model, [0, 1, 0], 40)
    text = [0, 1, 0, *written]
    assert len(ngrams(text, n)) == len(text) - n + 1 and len(set(written)) > 1
    assert notes(events) and spans(events, "forbidden repeats")[0][2] == "a" * n


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


WRONG_COUNTS = {
    "frequency once for each token": ("frequency_penalty", lambda seen, v: v in seen),
    "presence for each occurrence": ("presence_penalty", lambda seen, v: seen.count(v)),
}


@pytest.mark.refuses("frequency_penalty", "presence_penalty")
@pytest.mark.parametrize("name, wrong", WRONG_COUNTS.values(), ids=WRONG_COUNTS)
def test_a_wrong_count_is_detected(name, wrong):
    found = [apply(name, torch.zeros(4), text, penalty=1.0).tolist() for text in texts()]
    assert any(row != [-wrong(text, v) for v in range(4)] for row, text in zip(found, texts()))


def test_another_ngram_length_removes_other_tokens():
    text = [0, 1, 2, 3, 4, 1, 2, 0, 2, 0, 1, 2]
    banned = [
        set((apply("no_repeat_ngram", torch.zeros(6), text, n=n) == -math.inf).nonzero().flatten().tolist())
        for n in range(1, 6)
    ]
    assert banned == [{0, 1, 2, 3, 4}, {0, 3}, {0, 3}, {3}, set()]
