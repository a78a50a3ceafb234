"""What memory a policy really frees: bytes of the tensors that hold keys and values, and resident memory of the
process.

Every policy has a process of its own, so that none lives in what another one left behind. Looked at are the prompt with
one token behind it, the earliest moment at which every policy has acted, and the end of the text.
"""
from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields, is_dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from torch import Tensor

from playground.bench.caches.caches_defaults import NEAR
from playground.bench.caches.policy_configs import Point, full_cache
from playground.contract import Full, make
from playground.engine.device_memory import give_back, size_text
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.engine.kv_cache import KVCache


@dataclass(frozen=True)
class MemoryRequest:
    """What one process is to weigh."""

    point: Point
    shape: str
    prompt: int  # tokens
    written: int  # tokens behind it, two at least
    threads: int


class Weight(NamedTuple):
    """At one moment, in bytes."""

    full: int  # what a full cache of this length holds
    promised: float  # what the policy means to hold of it
    allocated: int  # storages of the tensors that hold keys and values
    resident: int  # memory of the process, beyond what it took before the prompt was read


@dataclass(frozen=True)
class Weighing:
    """One policy, behind the prompt and at the end of the text."""

    name: str
    early: Weight | None = None
    late: Weight | None = None
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            moment: weight and weight._asdict() for moment, weight in (("early", self.early), ("late", self.late))
        }


def weighings(orders: Sequence[MemoryRequest]) -> Iterator[Weighing]:
    """One after the other, each in a fresh process."""
    for order in orders:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                yield process.submit(weigh, order).result()
            except BrokenProcessPool as reason:
                yield Weighing(order.point.name, failure=str(reason))


def weigh(order: MemoryRequest) -> Weighing:
    """One policy in this process. A lane that fails or is refused says why."""
    try:
        return Weighing(order.point.name, *_moments(order))
    except (Refusal, RuntimeError) as reason:
        return Weighing(order.point.name, failure=str(reason))


def _moments(order: MemoryRequest) -> Iterator[Weight]:
    from playground.bench.caches.policy_lane import Driven, random_model, some_tokens
    torch.set_num_threads(order.threads)
    model = random_model(order.shape, order.prompt + order.written + 64)
    driven = Driven(order.point, model, some_tokens(model, order.prompt), order.written)
    before = _resident()
    driven.read()
    for generated in (1, order.written):
        while driven.store.length < order.prompt + generated:
            driven.step()
        yield _weight(order.point, driven.store, full_cache(model, order.prompt, generated), before)


def _weight(point: Point, store: KVCache, full: Full, before: int) -> Weight:
    """What a store holds now; `before` is the process's resident memory when it held nothing."""
    whole = 2 * full.length * full.layers * full.heads * full.head * full.bits // 8
    share = make(point.policy, **point.knobs).promise(full) if point.policy else 1.0
    return Weight(whole, share * whole, allocated(store), _resident() - before)


def allocated(store: KVCache) -> int:
    """Bytes of all storages that a store keeps alive for keys and values, each counted once, whatever part of it is
    used.
    """
    kept = {
        held.untyped_storage().data_ptr(): held.untyped_storage().nbytes()
        for pool in (*store.keys, *store.values)
        for thing in (pool.rows, pool.prefix, pool.packed)
        for held in tensors(thing)
    }
    return sum(kept.values())


def tensors(thing: Any) -> Iterator[Tensor]:
    """The tensors in a packed form, however it is built of dataclasses, lists and tuples."""
    if isinstance(thing, Tensor):
        yield thing
    elif is_dataclass(thing):
        for part in fields(thing):
            yield from tensors(getattr(thing, part.name))
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from tensors(part)


def _resident() -> int:
    """Memory in use. What was freed is handed back first: how much of it a C library keeps for later changes from run
    to run.
    """
    gc.collect()
    give_back()
    return psutil.Process().memory_info().rss


@dataclass(frozen=True)
class Freed:
    """How much less of a full cache a policy holds at one moment, as shares of that cache; of nothing promised nothing
    can be missing.
    """

    promised: float
    storages: float
    resident: float  # against the memory that the full cache's own process took

    @classmethod
    def of(cls, own: Weight, plain: Weight) -> Freed:
        return cls(
            1 - own.promised / own.full, 1 - own.allocated / own.full, (plain.resident - own.resident) / own.full
        )

    @property
    def off(self) -> tuple[float, float] | None:
        """How far storages and resident memory are from the promise, as shares of it; None where nothing is promised.
        """
        return (self.storages / self.promised - 1, self.resident / self.promised - 1) if self.promised > 0 else None

    @property
    def holds(self) -> bool:
        """No less was freed than promised, within NEAR; where nothing was promised, no more is held by as much."""
        least = (1 - NEAR) * self.promised if self.promised > 0 else -NEAR
        return min(self.storages, self.resident) >= least


def freed(found: Sequence[Weighing]) -> dict[str, tuple[Freed, Freed]]:
    """Behind the prompt and at the end, of every policy that came through; the first of them all is the full cache."""
    plain, *others = found
    if plain.failure:
        return {}
    return {
        each.name: (Freed.of(each.early, plain.early), Freed.of(each.late, plain.late))
        for each in others
        if not each.failure
    }


def rows(found: Sequence[Weighing]) -> list[list[str]]:
    """A table: what is held behind the prompt and at the end, and how much less that is than the full cache, as
    promised and as found.
    """
    gaps = freed(found)
    head = [
        "policy",
        "moment",
        "promised",
        "storages",
        "resident",
        "freed: promised",
        "storages",
        "resident",
        f"within {NEAR:.0%}",
    ]
    return [head, *(row for each in found for row in _rows_of(each, gaps.get(each.name)))]


def _rows_of(each: Weighing, gaps: tuple[Freed, Freed] | None) -> Iterator[list[str]]:
    if each.failure:
        yield [each.name, "failed", *["-"] * 6, "no"]
        return
    for moment, weight, gap in zip(("prompt", "end"), (each.early, each.late), gaps or (None, None)):
        sizes = [size_text(size) for size in (weight.promised, weight.allocated, weight.resident)]
        shares = (
            [f"{gap.promised:.1%}", f"{gap.storages:.1%}", f"{gap.resident:.1%}", "yes" if gap.holds else "no"]
            if gap
            else ["-", "-", "-", ""]
        )
        yield [each.name, moment, *sizes, *shares]
