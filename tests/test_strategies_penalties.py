"""Repetition: penalties, forbidden n-grams, DRY and momentum, against the library and independent counts."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from tables import TableModel

from playground.algorithms.sampling.repetition import last_tokens, repeat_lengths
from playground.contract.lane_config import LaneConfig
from support.penalties import alone, apply, repeat, run, texts

GREEDY = LaneConfig("greedy")
COLLAPSES = {
    "frequency_penalty": [Collapse(alone("frequency_penalty", penalty=0.0), GREEDY)],
    "presence_penalty": [
        Collapse(alone("presence_penalty", penalty=0.0), GREEDY),
        Collapse(alone("presence_penalty", penalty=1.5, window=1), alone("frequency_penalty", penalty=1.5, window=1)),
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


# --- wrong variants ---

WRONG_COUNTS = {
    "frequency once for each token": ("frequency_penalty", lambda seen, v: v in seen),
    "presence for each occurrence": ("presence_penalty", lambda seen, v: seen.count(v)),
}


@pytest.mark.refuses("frequency_penalty", "presence_penalty")
@pytest.mark.parametrize("name, wrong", WRONG_COUNTS.values(), ids=WRONG_COUNTS)
def test_a_wrong_count_is_detected(name, wrong):
    found = [apply(name, torch.zeros(4), text, penalty=1.0).tolist() for text in texts()]
    assert any(row != [-wrong(text, v) for v in range(4)] for row, text in zip(found, texts()))
