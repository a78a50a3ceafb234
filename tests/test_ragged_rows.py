"""Buffers whose heads hold different numbers of tokens, against rows in plain lists."""
from __future__ import annotations

import random

import pytest
import torch
from pairs import pair
from torch import Tensor

from playground.bench.caches.freed_memory import allocated
from playground.contract import make
from playground.contract.assembly import Assembly
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.engine.attention.attention_mask import EMPTY
from playground.engine.cache.kv_buffer import TAIL, KVBuffer, SlotOrder, selected_indices
from playground.engine.cache.kv_cache import KVCache

HEADS, D = 3, 4
PROMPT = [35, 80, 12, 77, 200, 9, 51, 144, 63, 7] * 6


def numbered(start: int, count: int) -> Tensor:
    """Rows [heads, count, d] of which every number is another one."""
    return torch.arange(HEADS * count * D, dtype=torch.float64).view(HEADS, count, D) + 1000 * start


class Plain:
    """A buffer beside lists of its rows by head and slot; None where a slot is empty."""

    def __init__(self) -> None:
        self.buffer, self.heads, self.scratch = KVBuffer(), [[] for _ in range(HEADS)], 0

    @property
    def trunk(self) -> int:
        return len(self.heads[0]) - self.scratch

    def write(self, number: int, count: int) -> None:
        rows = numbered(number, count)
        self.buffer.write(len(self.heads[0]), rows)
        self.scratch += count
        for head, own in zip(self.heads, rows):
            head += list(own)

    def commit(self) -> None:
        self.scratch = 0

    def evict(self, chance: random.Random, share: float) -> None:
        """Every head loses some slots of the trunk; the fullest one keeps one at least."""
        held = [[row is not None and chance.random() > share * head for row in own[:self.trunk]]
                for head, own in enumerate(self.heads, 1)]
        held[0][-1] = self.heads[0][self.trunk - 1] is not None or held[0][-1]
        live, counts = torch.tensor(held), [sum(own) for own in held]
        if max(counts) == self.trunk and min(counts) == self.trunk or not max(counts):
            return
        trunk = self.trunk
        self.buffer.compact(SlotOrder(selected_indices(live, counts), counts), trunk, self.scratch)
        for head, own in enumerate(self.heads):
            kept = [row for row, stays in zip(own, held[head]) if stays]
            self.heads[head] = kept + [None] * (max(counts) - len(kept)) + own[trunk:]

    def check(self) -> None:
        used = len(self.heads[0])
        rows, row = self.buffer.read(used), D * 8
        for own, expected in zip(rows, self.heads):
            assert all(torch.equal(a, b) for a, b in zip(own, expected) if b is not None)
            assert torch.isfinite(own).all()
        if self.buffer.ragged:
            tail = used - self.buffer.ragged.count
            held = sum(row is not None for own in self.heads for row in own[:self.buffer.ragged.count])
            assert self.buffer.bytes(used) == (held + HEADS * tail) * row, "empty slots take memory"


def course(seed: int) -> None:
    chance, plain = random.Random(seed), Plain()
    for number in range(30):
        plain.write(number, chance.randrange(1, 9))
        if chance.random() < 0.7:
            plain.commit()
        if plain.trunk and chance.random() < 0.5:
            plain.evict(chance, chance.choice([0.0, 0.1, 0.25]))
        twin = plain.buffer.twin(len(plain.heads[0]))
        plain.check()
        assert torch.equal(twin.read(len(plain.heads[0])), plain.buffer.read(len(plain.heads[0])))


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_every_head_are_found_again_and_empty_slots_take_no_memory(seed):
    course(seed)


def test_a_buffer_that_keeps_empty_slots_is_refused(monkeypatch):
    """The wrong variant counts as before: every head has the size of the fullest."""
    monkeypatch.setattr(KVBuffer, "bytes", lambda self, slots: slots * HEADS * D * 8)
    with pytest.raises(AssertionError, match="empty slots"):
        for seed in range(12):
            course(seed)


def test_a_copy_of_a_buffer_changes_alone():
    plain = Plain()
    plain.write(1, 6)
    plain.commit()
    plain.evict(random.Random(1), 0.25)
    before = plain.buffer.read(plain.trunk).clone()
    twin = plain.buffer.twin(plain.trunk)
    twin.write(plain.trunk, numbered(7, 2))
    twin.write(0, numbered(8, plain.trunk))
    assert torch.equal(plain.buffer.read(plain.trunk), before)
    assert torch.equal(twin.read(plain.trunk), numbered(8, plain.trunk))


# --- lanes ---

UNEVEN = {"kvzip": {"capacity": 16}, "ada_kv": {"capacity": 16, "window": 4, "alpha": 0.0}}


def stores(name: str) -> list[tuple[str, KVCache]]:
    """The text so far and the cache, after every step."""
    assembly, target = Assembly(make("greedy"), cache_policy=make(name, **UNEVEN[name])), pair().target
    limits = Limits(0, 12)
    runner = Runner(Lane(PROMPT, {"target": target}, assembly, limits, Silent(target.tokens)), assembly)
    while not runner.finished:
        runner.advance()
    return runner.lane.main.written, runner.lane.target.store


@pytest.mark.parametrize("name", UNEVEN)
def test_a_head_takes_the_memory_of_the_tokens_it_holds(name):
    _, store = stores(name)
    row = 2 * store.keys[0].ragged.held.shape[1] * 8  # of a key and a value in float64
    held = sum(int((slots.positions != EMPTY).sum()) for slots in store.slots)
    most = sum(slots.count * store.heads for slots in store.slots)
    assert held < most and store.bytes() == held * row
    assert allocated(store) <= (held + store.depth * store.heads * TAIL) * row


@pytest.mark.parametrize("name", UNEVEN)
def test_the_text_is_that_of_heads_that_share_a_buffer(name, monkeypatch):
    written, _ = stores(name)
    monkeypatch.setattr(SlotOrder, "is_ragged", False)
    shared, store = stores(name)
    assert written == shared and all(buffer.ragged is None for buffer in store.keys)
