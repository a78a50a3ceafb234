"""CUR: the order of tokens by NVIDIA's kvpress, and its rule in plain Python."""
from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from playground.contract import Held, find, make
from support.budget_policies import best, roomy
from support.kvpress_scores import CUR, OUT, TOKENS, WINDOWS, states

Cur = find("cur")
COLLAPSES = {"cur": roomy("cur", size=2048)}
REFERENCE = json.loads(OUT.read_text(encoding="utf-8"))["cur"]
SINKS = 4


def held(keys=None, values=None, positions=None) -> Held:
    """Slots with these keys and values, [kv_heads, slots, head_dim]; by default those of the reference."""
    parts = {"keys": states("keys") if keys is None else keys, "values": states("values") if values is None else values}
    slots = torch.arange(TOKENS)[None] if positions is None else torch.tensor(positions)
    return Held(0, 1, "keep", int(slots.max()) + 1, int(slots.max()) + 1, slots, read=parts.get)


def stays(policy, what: Held) -> list[set[int]]:
    kept = policy.retain(what) & what.live
    return [set(row[chosen].tolist()) for row, chosen in zip(what.positions.expand_as(kept), kept)]


def of_the_library(leverage: str, width: int, size: int) -> list[set[int]]:
    """The tokens that the library's scores put first; it gives the first four tokens the largest score."""
    return [best(dict(enumerate(scores)), size) for scores in REFERENCE[f"{leverage} {width}"]]


CASES = list(product(CUR, WINDOWS, (6, 12, 30)))


@pytest.mark.oracle("cur")
@pytest.mark.parametrize("leverage, width, size", CASES)
def test_the_tokens_that_stay_are_those_of_the_library(leverage, width, size):
    policy = make("cur", leverage=leverage, width=width, size=size, sinks=SINKS)
    assert stays(policy, held()) == of_the_library(leverage, width, size)


@pytest.mark.oracle("cur")
def test_scores_are_in_the_librarys_proportion():
    for leverage, width in product(CUR, WINDOWS):
        found = make("cur", leverage=leverage, width=width, sinks=SINKS).scores(held())[:, SINKS:]
        theirs = torch.tensor(REFERENCE[f"{leverage} {width}"])[:, SINKS:]
        assert torch.allclose(found / found.sum(1, keepdim=True), theirs / theirs.sum(1, keepdim=True), atol=2e-6)


def by_hand(what: Held, size: int, width: int) -> list[set[int]]:
    """Products of shares within windows of positions, over the live slots of each head."""
    found = []
    for keys, values, row in zip(what.read("keys"), what.read("values"), what.positions.expand(3, -1).tolist()):
        live = {p: slot for slot, p in enumerate(row) if p >= 0}
        of_keys, of_values = (
            shares({p: float(part[slot] @ part[slot]) for p, slot in live.items()}, width) for part in (keys, values)
        )
        found.append(best({p: of_keys[p] * of_values[p] if p >= SINKS else float("inf") for p in live}, size))
    return found


def shares(sizes: dict[int, float], width: int) -> dict[int, float]:
    """Each size by position as a share of those in its window."""
    return {
        p: size / sum(each for other, each in sizes.items() if other // width == p // width)
        for p, size in sizes.items()
    }


def with_gaps() -> Held:
    """Heads that hold different tokens, and slots that are empty, in which something is left over."""
    keys, values = states("keys")[:, :12].double(), states("values")[:, :12].double()
    keys[1, 10:], values[2, 7:] = 1e3, float("nan")
    return held(keys, values, [list(range(12)), [*range(3, 23, 2), -1, -1], [0, 3, 5, 8, 9, 20, 21, *[-1] * 5]])


@pytest.mark.oracle("cur")
@pytest.mark.parametrize("size", [5, 6, 7])
def test_windows_are_cut_by_position_where_tokens_are_gone(size):
    assert stays(make("cur", size=size, width=4, sinks=SINKS), with_gaps()) == by_hand(with_gaps(), size, 4)


class WholeText(Cur):
    """Wrong: shares of the whole text."""

    def _shares(self, sizes, held):
        return sizes / sizes.sum(1, keepdim=True)


class Norms(Cur):
    """Wrong: norms in place of their squares."""

    def _shares(self, sizes, held):
        return super()._shares(sizes.sqrt(), held)


class WithoutSinks(Cur):
    """Wrong: the first tokens may go."""

    def scores(self, held):
        return super().scores(held).nan_to_num(posinf=0.0)


class BySlot(Cur):
    """Wrong: windows of slots, whatever their positions."""

    def _shares(self, sizes, held):
        slots = torch.arange(sizes.shape[1]).expand(len(sizes), -1).masked_fill(~held.live, -1)
        return super()._shares(sizes, Held(0, 1, "keep", 0, sizes.shape[1], slots, read=held.read))


@pytest.mark.refuses("cur")
@pytest.mark.parametrize("wrong", [WholeText, Norms, WithoutSinks])
def test_other_shares_are_not_the_librarys(wrong):
    assert stays(wrong(width=5, size=12, sinks=SINKS), held()) != of_the_library("product", 5, 12)


@pytest.mark.refuses("cur")
def test_windows_of_slots_are_detected():
    assert any(
        stays(BySlot(size=size, width=4, sinks=SINKS), with_gaps()) != by_hand(with_gaps(), size, 4)
        for size in (5, 6, 7)
    )
