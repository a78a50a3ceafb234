"""Measures the memory that a policy actually frees: bytes of the KV cache tensors, and resident memory of the process.

Every policy runs in a separate process, so that none reuses memory that another one freed. Memory is measured one token
after the prompt, the earliest step after which every policy has acted, and at the end of the text.
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
from playground.bench.report_text import Rows
from playground.contract import Full, make
from playground.engine.device_memory import size_text
from playground.engine.heap_memory import give_back
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.engine.cache.kv_cache import KVCache


@dataclass(frozen=True)
class MemoryRequest:
    """One measurement, as its process needs it."""

    point: Point
    shape: str
    prompt: int  # tokens
    written: int  # tokens after it, at least two
    threads: int


class MemoryUse(NamedTuple):
    """Bytes after one step."""

    full: int  # of a full cache of this length
    promised: float  # of this, what the policy is meant to hold
    allocated: int  # storages of the KV cache tensors
    resident: int  # growth of the process's memory since before the prefill


@dataclass(frozen=True)
class MemoryResult:
    """One policy, after the prompt and at the end of the text."""

    name: str
    early: MemoryUse | None = None
    late: MemoryUse | None = None
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        uses = {"early": self.early, "late": self.late}
        return asdict(self) | {name: use and use._asdict() for name, use in uses.items()}


def measure_all(requests: Sequence[MemoryRequest]) -> Iterator[MemoryResult]:
    """One after the other, each in a new process."""
    for request in requests:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                yield process.submit(measure, request).result()
            except BrokenProcessPool as reason:
                yield MemoryResult(request.point.name, failure=str(reason))


def measure(request: MemoryRequest) -> MemoryResult:
    """Measure one policy in this process. If its lane fails or is refused, the result says why."""
    try:
        return MemoryResult(request.point.name, *_uses(request))
    except (Refusal, RuntimeError) as reason:
        return MemoryResult(request.point.name, failure=str(reason))


def _uses(request: MemoryRequest) -> Iterator[MemoryUse]:
    from playground.bench.caches.policy_lane import PolicyLane, random_model, some_tokens
    torch.set_num_threads(request.threads)
    model = random_model(request.shape, request.prompt + request.written + 64)
    lane = PolicyLane(request.point, model, some_tokens(model, request.prompt), request.written)
    before = _resident()
    lane.prefill()
    for generated in (1, request.written):
        while lane.store.length < request.prompt + generated:
            lane.step()
        yield _memory_use(request.point, lane.store, full_cache(model, request.prompt, generated), before)


def _memory_use(point: Point, store: KVCache, full: Full, before: int) -> MemoryUse:
    """Memory in use now; `before` is the process's resident memory with an empty cache."""
    whole = 2 * full.length * full.layers * full.heads * full.head * full.bits // 8
    share = make(point.policy, **point.knobs).expected_share(full) if point.policy else 1.0
    return MemoryUse(whole, share * whole, allocated(store), _resident() - before)


def allocated(store: KVCache) -> int:
    """Bytes of all storages of a KV cache, each counted once, unused parts included."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for pool in (*store.keys, *store.values)
        for held in (pool.rows, pool.prefix, pool.quantised_rows, pool.ragged)
        for tensor in tensors(held)
    }
    return sum(storages.values())


def tensors(nested: Any) -> Iterator[Tensor]:
    """The tensors in any nesting of dataclasses, lists and tuples."""
    if isinstance(nested, Tensor):
        yield nested
    elif is_dataclass(nested):
        for part in fields(nested):
            yield from tensors(getattr(nested, part.name))
    elif isinstance(nested, (list, tuple)):
        for part in nested:
            yield from tensors(part)


def _resident() -> int:
    """Resident memory of the process in bytes. Freed memory is returned to the system first, since how much of it the C
    library retains varies between runs.
    """
    gc.collect()
    give_back()
    return psutil.Process().memory_info().rss


@dataclass(frozen=True)
class Freed:
    """Memory that a policy saves after one step, as shares of a full cache."""

    promised: float
    storages: float
    resident: float  # compared with the full cache's process

    @classmethod
    def of(cls, own: MemoryUse, plain: MemoryUse) -> Freed:
        return cls(
            1 - own.promised / own.full, 1 - own.allocated / own.full, (plain.resident - own.resident) / own.full
        )

    @property
    def off(self) -> tuple[float, float] | None:
        """Relative deviation of storages and of resident memory from the promise; None if nothing is promised."""
        return (self.storages / self.promised - 1, self.resident / self.promised - 1) if self.promised > 0 else None

    @property
    def holds(self) -> bool:
        """Whether as much was freed as promised, within NEAR. If nothing was promised, usage may grow by NEAR."""
        least = (1 - NEAR) * self.promised if self.promised > 0 else -NEAR
        return min(self.storages, self.resident) >= least


def freed(results: Sequence[MemoryResult]) -> dict[str, tuple[Freed, Freed]]:
    """Savings after the prompt and at the end, by policy, without failed ones. The first result is the full cache."""
    plain, *others = results
    if plain.failure:
        return {}
    return {
        each.name: (Freed.of(each.early, plain.early), Freed.of(each.late, plain.late))
        for each in others
        if not each.failure
    }


def rows(results: Sequence[MemoryResult]) -> Rows:
    """A table: memory after the prompt and at the end, and savings over the full cache, promised and measured."""
    gaps = freed(results)
    header = ["policy", "after", "promised", "storages", "resident", "freed: promised", "storages", "resident",
              f"within {NEAR:.0%}"]
    return [header, *(row for result in results for row in _rows_of(result, gaps.get(result.name)))]


def _rows_of(result: MemoryResult, gaps: tuple[Freed, Freed] | None) -> Iterator[list[str]]:
    if result.failure:
        yield [result.name, "failed", *["-"] * 6, "no"]
        return
    for after, use, gap in zip(("prompt", "end"), (result.early, result.late), gaps or (None, None)):
        sizes = [size_text(size) for size in (use.promised, use.allocated, use.resident)]
        yield [result.name, after, *sizes, *(_shares(gap) if gap else ["-", "-", "-", ""])]


def _shares(gap: Freed) -> list[str]:
    shares = (gap.promised, gap.storages, gap.resident)
    return [*(f"{share:.1%}" for share in shares), "yes" if gap.holds else "no"]
