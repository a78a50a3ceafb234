"""Attention entropy against the library's own attention weights in plain loops, and closed formulas."""
from __future__ import annotations

import math

import pytest
import torch
from pairs import network, pair

from playground.contract import OverlaidText, find
from support.overlay_runs import named, read_by, shades

AttentionEntropy = find("attention_entropy")
TOKENS = [70, 71, 72, 70, 71, 90, 70, 71, 72, 91, 70]
START = 4


def library_weights(tokens: list[int]) -> list[list[list[list[float]]]]:
    """[layers][heads][rows][slots], by the transformers library."""
    model = network("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(input_ids=torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    return [layer[0].tolist() for layer in found]


def by_hand(quantity: str, row: list[float], at: int) -> float:
    """A quantity of one row of one head, in plain Python."""
    seen = row[:at + 1]
    if quantity == "entropy":
        return -sum(w * math.log(w) for w in seen if w > 0) / math.log(len(seen))
    if quantity == "sink":
        return seen[0]
    if quantity == "distance":
        return sum(w * (at - s) for s, w in enumerate(seen)) / at
    if quantity == "previous":
        return seen[at - 1]
    return sum(w for s, w in enumerate(seen) if s and TOKENS[s - 1] == TOKENS[at])


def check(cls: type[AttentionEntropy]) -> None:
    weights = library_weights(TOKENS)
    for quantity in ("entropy", "sink", "distance", "previous", "induction"):
        events = read_by(cls(quantity=quantity), pair().target, TOKENS, START)
        rows = range(START - 1, len(TOKENS) - 1)  # those that predict the generated tokens
        values = [[[by_hand(quantity, head[at], at) for at in rows] for head in layer] for layer in weights]
        heads = [head for layer in values for head in layer]
        assert shades(events) == pytest.approx([sum(column) / len(heads) for column in zip(*heads)], abs=1e-4)
        grid = [[sum(head) / len(rows) for head in layer] for layer in values]
        assert named(events, find_name(events, "mean by head"))["values"] == [
            pytest.approx(layer, abs=1e-4) for layer in grid
        ]


def find_name(events, ending: str) -> str:
    return next(event.name for event in events if getattr(event, "name", "").endswith(ending))


class OverTheContext(AttentionEntropy):
    """Wrong: every row by the logarithm of the context's length, as the paper's code does, whatever it sees."""

    def measure(self, name, weights, at):
        found = super().measure(name, weights, at)
        return found * (at + 1).log() / math.log(256) if name == "entropy" else found


class OfTheTokenItself(AttentionEntropy):
    """Wrong: the row that read a token, not the one that predicted it."""

    def begin(self, text, model):
        super().begin(OverlaidText(text.tokens, text.start + 1, text.piece), model)


class WithoutTheShift(AttentionEntropy):
    """Wrong: induction looks at earlier occurrences themselves, not at what followed them."""

    def measure(self, name, weights, at):
        if name != "induction":
            return super().measure(name, weights, at)
        same = self._tokens[:weights.shape[-1]] == self._tokens[at][:, None]
        return (weights * same).sum(-1)


@pytest.mark.oracle("attention_entropy")
def test_every_quantity_equals_that_of_the_librarys_weights():
    check(AttentionEntropy)


@pytest.mark.refuses("attention_entropy")
@pytest.mark.parametrize("wrong", [OverTheContext, OfTheTokenItself, WithoutTheShift])
def test_a_wrong_maximum_row_or_shift_fails(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def entropy_of(row: list[float]) -> float:
    weights = torch.tensor([[row]], dtype=torch.float64)
    return float(AttentionEntropy().measure("entropy", weights, torch.tensor([len(row) - 1])))


@pytest.mark.strategy("attention_entropy")
def test_uniform_one_hot_and_two_equal_weights_have_their_closed_values():
    assert entropy_of([0.25] * 4) == pytest.approx(1)
    assert entropy_of([1.0, 0, 0, 0]) == 0
    assert entropy_of([0.5, 0.5, 0, 0]) == pytest.approx(math.log(2) / math.log(4))
    assert math.isnan(entropy_of([1.0]))


@pytest.mark.strategy("attention_entropy")
def test_a_window_counts_what_it_sees_and_a_learned_sink_is_one_more_slot():
    assert entropy_of([0, 0, 0.5, 0.5]) == pytest.approx(1)
    assert entropy_of([0.25, 0.25, 0.25]) == pytest.approx(1)


@pytest.mark.strategy("attention_entropy")
def test_received_attention_is_the_mean_over_the_rows_that_see_a_token():
    events = read_by(AttentionEntropy(), pair().target, TOKENS, START)
    weights = library_weights(TOKENS)
    heads = [head for layer in weights for head in layer]
    shares = [sum(head[at][0] for head in heads for at in range(len(TOKENS))) / len(heads) / len(TOKENS)]
    assert named(events, "attention received")["values"][0] == pytest.approx(shares[0], abs=1e-4)
