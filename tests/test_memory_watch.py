"""A public page ends the run with the largest KV caches before its device runs out of memory."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
from counting import Counting, committed
from pairs import pair

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session, prepare
from playground.engine.model import Model
from playground.request_limits import Rules
from playground.ui.models.fits import DeviceMemory
from playground.ui.server.memory_watch import MemoryWatch
from playground.ui.server.site import Site
from playground.ui.server.worker import TOO_LARGE, Worker

GB = 10**9


class Growing(Counting):
    """Its caches grow by a gigabyte with every token; `all_caches` are those of all runs."""

    def __init__(self, all_caches: dict, name: str, length: int):
        super().__init__([], name, length)
        self.caches = all_caches

    def advance(self):
        self.caches[self.name] = self.caches.get(self.name, 0) + GB
        return super().advance()

    def cache_bytes(self) -> int:
        return self.caches.get(self.name, 0)


class Machine:
    """The memory of 100 GB that caches and another process share."""

    def __init__(self, elsewhere: int = 0):
        self.caches: dict[str, int] = {}
        self.elsewhere = elsewhere

    def memory(self, device: str) -> DeviceMemory:
        return DeviceMemory(100 * GB, 100 * GB - self.elsewhere - sum(self.caches.values()))

    def worker(self) -> Worker:
        return Worker(MemoryWatch("cpu", self.memory, pause=0.0))


def test_the_run_with_the_largest_caches_ends_and_the_others_finish():
    machine = Machine()
    worker = machine.worker()
    small, large = (worker.take(Growing(machine.caches, name, length)) for name, length in (("a", 20), ("b", 500)))
    assert committed(small.frames()) == list(range(1, 21)) and not small.error
    machine.caches.pop("a")
    written = committed(large.frames())
    assert large.error == TOO_LARGE
    assert len(written) == 91, "as soon as less than 10 GB of the 100 were free"


def test_no_run_ends_for_memory_that_something_else_takes():
    machine = Machine(elsewhere=95 * GB)
    run = machine.worker().take(Growing(machine.caches, "a", 4))
    assert committed(run.frames()) == [1, 2, 3, 4] and not run.error


def test_memory_is_read_once_in_a_while():
    readings = []
    watch = MemoryWatch("cpu", lambda device: readings.append(device) or DeviceMemory(100, 5), pause=60)
    assert [watch.missing() for _ in range(3)] == [5, 0, 0] and readings == ["cpu"]


@pytest.mark.parametrize("public", [True, False])
def test_only_a_public_page_watches_its_memory(public):
    site = Site(rules=Rules.for_visitors(False) if public else Rules())
    models = SimpleNamespace(target=SimpleNamespace(device="cpu"))
    assert (site.runs.worker(models)._watch is not None) == public


def test_the_caches_of_a_run_are_the_key_and_value_states_of_its_lanes():
    both = pair("llama")
    drafting = LaneConfig("speculative", extras=[("draft_model", {}), ("greedy_match", {})])
    greedy, speculative = (after_run(both, lanes) for lanes in ([LaneConfig("greedy")], [drafting]))
    prompt = len(greedy.headers[0].prompt_pieces)
    assert greedy.cache_bytes() == (prompt + 4) * state_bytes(both.target), "the last of 5 tokens is not read"
    least = prompt * (state_bytes(both.target) + state_bytes(both.draft))
    assert least < speculative.cache_bytes() < 2 * least
    assert after_run(both, [LaneConfig("greedy")] * 2).cache_bytes() == 2 * greedy.cache_bytes()


def after_run(models: Models, lanes: list[LaneConfig]) -> Session:
    session = prepare(models, lanes, Prompt("Once upon a time"), Limits(max_new_tokens=5))
    assert session.cache_bytes() == 0
    list(session)
    return session


def state_bytes(model: Model) -> int:
    """Memory of the key and value states of one token."""
    config = model.network.config
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return values * model.dtype.itemsize
