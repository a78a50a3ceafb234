"""Momentum decoding."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tables import TableModel, write
from torch import Tensor

from playground.contract import Sampler, find, make
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine import sampling
from playground.errors import Refusal
from playground.events import Figure
from support.penalties import alone, apply, notes, repeat, run, spans, texts
from support.repeating_texts import REMOVED, V, applied, repeating, scores_for
from support.wrong_variants import refused


def worth(p: list[float], text: list[int], k: int, alpha: float, resistance: list[float]) -> dict[int, float]:
    """Of the k most probable tokens, by the method's definition."""
    best = sorted(range(len(p)), key=lambda token: -p[token])[:k]
    costs = [0.0, *resistance]
    return {token: p[token] - alpha * costs[repeat(text, token, len(resistance))] for token in best}


def random_rows(count: int, size: int = 6) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1.5


def momentum_choices(
    choose: Callable[[dict[int, float]], int] = lambda found: max(found, key=found.get), shift: int = 0, **wrong
) -> list[bool]:
    """Whether the sampler takes what the definition takes, over random rows and texts; `wrong` changes the definition.
    """
    setting = {"k": 3, "alpha": 0.2, "resistance": [1.0, 3.0, 4.0, 5.0, 5.0]}
    same = []
    for row, text in zip(random_rows(300), texts(300, letters=6)):
        expected = worth(row.softmax(-1).tolist(), text[:len(text) - shift], **(setting | wrong))
        same.append(int(apply("momentum", row, text, k=3).argmax()) == choose(expected))
    return same


@pytest.mark.oracle("momentum")
def test_the_candidate_with_the_highest_value_is_chosen():
    assert all(momentum_choices())


WRONG_MOMENTA = {
    "resistances one length too early": {"resistance": [3.0, 4.0, 5.0, 5.0, 5.0]},
    "new tokens that pay": {"resistance": [0.0, 1.0, 3.0, 4.0, 5.0]},
    "a repeat found without the last token": {"shift": 1},
    "all tokens for candidates": {"k": 6},
    "negative worth cut off": {"choose": lambda found: max(found, key=lambda token: max(found[token], 0.0))},
}


@pytest.mark.refuses("momentum")
@pytest.mark.parametrize("wrong", WRONG_MOMENTA.values(), ids=WRONG_MOMENTA)
def test_a_wrong_momentum_is_detected(wrong):
    assert not all(momentum_choices(**wrong))


def test_values_keep_their_order_below_zero_and_sampling_follows_them_above():
    row, text = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log(), [0, 1, 0, 2]
    found = apply("momentum", row, text, alpha=0.1, resistance="1")  # all were there: 0.6, 0.1, 0.0 are left
    assert found.softmax(-1).tolist() == pytest.approx([6 / 7, 1 / 7, 0])
    below = apply("momentum", row, text, alpha=1.0, resistance="1")  # -0.3, -0.8, -0.9
    assert below.sort(descending=True).indices.tolist() == [0, 1, 2] and below.isfinite().all()


def test_removed_tokens_are_no_candidates():
    found = apply("momentum", torch.tensor([-math.inf, 1.0, 0.0, -math.inf]), [1, 1, 1], k=4, alpha=1.0)
    assert found.isfinite().tolist() == [False, True, True, False] and int(found.argmax()) == 2


def test_worked_example_a_loop_ends_once_repeating_costs_more_than_the_next_best():
    model = TableModel("abc", rule=lambda context: torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log())
    written, events = run(alone("momentum", k=2, prompt=False), model, [0, 0], 4)
    # a second a is still worth 0.6 - 0.2; a third would repeat "aa", which leaves it nothing
    assert written == [0, 0, 1, 0]
    assert [(label, depth) for _, _, label, depth in spans(events, "momentum")] == [
        ("greedy, new", 0), ("greedy, again", 1), ("detour", 0), ("greedy, again", 1)]
    assert notes(events) == ["'a' would repeat 2 tokens; 'b' was chosen instead."]


def test_the_value_of_every_candidate_is_reported():
    model = TableModel("abc", rule=lambda context: torch.tensor([0.5, 0.4, 0.1], dtype=torch.float64).log())
    _, events = run(alone("momentum", k=3), model, [0, 0], 3)
    kinds = [label for _, _, label, _ in spans(events, "momentum")]
    assert len(kinds) == 3 and kinds[0] == "detour"
    table = next(event.data for event in events if isinstance(event, Figure) and event.name == "candidates")
    assert table["rows"] == ["a", "b", "c"] and table["values"][0] == pytest.approx([0.5, 2, 0.5 - 0.2 * 3])


@pytest.mark.parametrize("resistance", ["", "one two", "1, 2", "1 inf", "nan"])
def test_a_list_that_is_no_list_of_numbers_is_refused(resistance):
    with pytest.raises(Refusal, match="takes numbers separated by spaces"):
        make("momentum", resistance=resistance)


def test_the_repetition_penalty_equals_the_librarys():
    assert torch.equal(apply("repetition_penalty", torch.tensor([2.0, -1.0, 0.5]), [0, 1, 1], penalty=1.2),
                       sampling.repetition_penalty(torch.tensor([2.0, -1.0, 0.5]), [0, 1], 1.2))
    assert find("repetition_penalty").stage == "penalty"


def test_the_prompt_counts_as_repeated_text():
    model = TableModel("abcd", rule=lambda context: torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64))
    assert write(
        assemble(alone("no_repeat_ngram", n=2)), {"target": model}, [0, 0], Limits(max_new_tokens=1), Draws(0)
    ).tokens == [0, 0, 1]


Momentum = find("momentum")
RESISTANCE = [1.0, 3.0, 4.0, 5.0, 5.0]


def longest_repeat(text: list[int], token: int) -> int:
    """Tokens of the longest n-gram, of five at most, that a token would repeat, itself included; 0 where it is new."""
    whole, ends = [*text, token], range(1, len(text) + 1)
    return max((n for n in range(1, 6) if any(text[max(end - n, 0) : end] == whole[-n:] for end in ends)), default=0)


def check_momentum(cls: type[Sampler]) -> None:
    """Of the k most probable tokens the one of the largest p - alpha * resistance; no other can be sampled."""
    for number, text in enumerate(repeating(200, letters=V)):
        p = scores_for(number).softmax(-1).tolist()
        best = sorted(range(V), key=lambda token: -p[token])[:3]
        worth = {token: p[token] - 0.2 * [0.0, *RESISTANCE][longest_repeat(text, token)] for token in best}
        found = applied(cls, text, scores_for(number), k=3, alpha=0.2)
        assert {v for v in range(V) if found[v] > REMOVED} == set(best)
        assert sorted(best, key=lambda token: -found[token]) == sorted(best, key=lambda token: -worth[token])
        assert all(math.exp(found[v]) == pytest.approx(worth[v]) for v in best if worth[v] > 1e-3)


class OneLengthTooEarly(Momentum):
    def _costs(self, depths):
        return super()._costs([min(depth + 1, len(RESISTANCE)) if depth else 0 for depth in depths])


class NewTokensPayToo(Momentum):
    def _costs(self, depths):
        return self.resistances()[:1] * len(depths) if not any(depths) else super()._costs([d or 1 for d in depths])


class ForgetsTheLastToken(Momentum):
    def candidates(self, row, history):
        return super().candidates(row, history[:-1])


class OneCandidateMore(Momentum):
    def candidates(self, row, history):
        self.k = 4
        return super().candidates(row, history)


@pytest.mark.oracle("momentum")
def test_momentum_penalises_each_candidate_by_the_repeat_it_would_complete():
    check_momentum(Momentum)


@pytest.mark.refuses("momentum")
@pytest.mark.parametrize("wrong", [OneLengthTooEarly, NewTokensPayToo, ForgetsTheLastToken, OneCandidateMore])
def test_a_wrong_momentum_is_refused(wrong):
    refused(check_momentum, wrong)
