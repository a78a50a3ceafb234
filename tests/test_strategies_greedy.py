"""Greedy against the library on table models, and wrong variants against the same check."""
from __future__ import annotations

import pytest
from pairs import greedy_text, pair
from runs import run
from tables import TableModel
from torch import Tensor

from playground.contract import Decoder, find
from playground.contract.assembly import Assembly
from support.plain_lanes import ReadsOneRowTwice
from support.wrong_variants import refused

Greedy = find("greedy")


def check_greedy(cls: type[Decoder]) -> None:
    """The library's own argmax on a network; on a table the largest score, the lowest id where two are equal."""
    prompt = [54, 71, 71, 54, 9]
    lane, _ = run(Assembly(cls()), {"target": pair().target}, prompt, 8)
    assert lane.main.written == greedy_text("llama", prompt, 8)
    for seed in range(4):
        opinions = TableModel("abcde", seed=seed)
        table = TableModel("abcde", rule=lambda context, opinions=opinions: opinions.scores(context).round())
        text = [0, 1]
        for _ in range(12):
            row = table.scores(tuple(text)).tolist()
            text.append(row.index(max(row)))
        assert run(Assembly(cls()), {"target": table}, [0, 1], 12)[0].tokens == text


class PlainDecoder(Greedy):
    """The loop of greedy decoding with a choice of its own."""

    def decode(self, lm):
        rows = yield lm.prefill()
        while True:
            yield lm.keep(lm.choose(rows, self.chosen(rows.scores[-1])))
            rows = yield lm.extend()

    def chosen(self, row: Tensor) -> int:
        return int(row.argmax())


class LastOfEquals(PlainDecoder):
    def chosen(self, row):
        return len(row) - 1 - int(row.flip(0).argmax())


class SecondBest(PlainDecoder):
    def chosen(self, row):
        return int(row.topk(2).indices[1])


@pytest.mark.oracle("greedy")
def test_greedy_writes_the_librarys_argmax_and_breaks_ties_by_the_lowest_id():
    check_greedy(Greedy)


def test_the_loop_of_the_wrong_variants_is_greedy_itself():
    check_greedy(PlainDecoder)


@pytest.mark.refuses("greedy")
@pytest.mark.parametrize("wrong", [LastOfEquals, SecondBest, ReadsOneRowTwice])
def test_a_wrong_greedy_is_refused(wrong):
    refused(check_greedy, wrong)
