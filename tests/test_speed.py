"""Regressions of speed: ratios of CPU time with wide margins, and exact counts.

Absolute speed is measured by the benchmark. Here every time is CPU time of one thread, the
minimum of a few short runs, so that other load hardly matters.
"""
from __future__ import annotations

from collections import Counter
from time import thread_time

import pytest
import torch
from pace import here

import playground
from playground.bench.speed.baselines import Baseline, TwinModels, load_twice
from playground.bench.speed.block_timing import blocks, prefilled_cache
from playground.bench.speed.decode_timing import decode_baselines, first_token_baselines, without_end_tokens
from playground.bench.speed.speed_defaults import ENGINE, FIRST, LANE, LIBRARY, SILENT_LANE, apart, block, together
from playground.bench.speed.speed_prompts import Task
from playground.bench.speed.speed_suite import prompt_ids
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.checkpoint.catalogue import BUNDLED
from playground.engine.loading.load import Loading
from playground.engine.model import Model
from playground.events import Commit, Done, Event, Forward, Verdict

pytestmark = pytest.mark.bench

PROMPT, LENGTH, RUNS = 64, 12, 3
COMPARED = {LANE, SILENT_LANE, LIBRARY, together(4), apart(4), FIRST, ENGINE}
EDIT = (
    "Write tailor where it says smith.\nText: Grewath gave the cook some fish. In Dakest the smith made a table. The"
    " horse slept under the ring."
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bundled() -> TwinModels:
    return load_twice(BUNDLED[0].name, Loading("cpu"), lambda share, text: None)


@pytest.fixture(scope="module")
def pair() -> Models:
    return playground.load(device="cpu")


@pytest.fixture(scope="module")
def task(bundled) -> Task:
    return Task("so many tokens", "", ids=tuple(prompt_ids(bundled.model, PROMPT)))


@pytest.fixture(scope="module")
def seconds(bundled, task) -> dict[str, float]:
    """CPU seconds of every baseline after the prompt."""
    ours = without_end_tokens(bundled)
    everyone = [*decode_baselines(ours, LENGTH, [4], compiled=False), *first_token_baselines(ours)]
    return least([contender for contender in everyone if contender.name in COMPARED], task)


def least(everyone: list[Baseline], task: Task) -> dict[str, float]:
    """CPU seconds of the best run of each, interleaved, after a warm-up."""
    runs = [{contender.name: processor_seconds(contender, task) for contender in everyone} for _ in range(RUNS + 1)]
    return {contender.name: min(run[contender.name] for run in runs[1:]) for contender in everyone}


def processor_seconds(contender: Baseline, task: Task) -> float:
    asked = contender.ready(task)
    start = thread_time()
    left = contender.write(asked)
    taken = thread_time() - start
    contender.read(left)
    return taken


def test_a_plain_lane_that_records_everything_keeps_up_with_the_librarys_generate(seconds):
    assert seconds[LIBRARY] / seconds[LANE] >= 0.8


def test_recording_every_event_costs_at_most_a_fifth_of_the_librarys_time(seconds):
    assert seconds[LANE] - seconds[SILENT_LANE] <= seconds[LIBRARY] / 5  # an eighth, with numba and without


def test_four_lanes_together_are_not_slower_than_one_after_the_other(seconds):
    assert seconds[together(4)] <= seconds[apart(4)]


def test_the_first_token_takes_at_most_twice_a_bare_prefill(seconds):
    assert seconds[FIRST] / seconds[ENGINE] <= 2


def test_a_tree_of_sixteen_nodes_costs_at_most_ten_single_nodes(bundled, task):
    found = least(blocks(bundled.model, prefilled_cache(bundled.model, list(task.ids)), (1, 16)), task)
    assert found[block(16)] / found[block(1)] <= 10  # 1.7 by torch alone, 5 by numba, whose single one is the fastest


def test_loading_the_bundled_pair_takes_under_two_seconds():
    playground.load(device="cpu")  # excludes the imports
    start = thread_time()
    playground.load(device="cpu")
    assert thread_time() - start < here(2)


@pytest.fixture
def counted(monkeypatch) -> Counter:
    """Number of forwards of each model."""
    counts: Counter = Counter()
    monkeypatch.setattr(Model, "forward", counting(Model.forward, "forward", counts))
    return counts


def counting(method, name: str, counts: Counter):
    def called(self, *args, **kwargs):
        counts[self.name, name] += 1
        return method(self, *args, **kwargs)
    return called


def run(models: Models, config: LaneConfig) -> list[Event]:
    events = [
        stamped.event for stamped in prepare(models, [config], Prompt(EDIT, chat=True), Limits(max_new_tokens=40))
    ]
    assert isinstance(events[-1], Done)
    return events


def written(events: list[Event]) -> int:
    return sum(len(event.ids) for event in events if isinstance(event, Commit))


def test_a_plain_lane_takes_one_forward_per_token_including_the_prefill(pair, counted):
    events = run(pair, LaneConfig("greedy"))
    assert counted[pair.target.name, "forward"] == written(events) > 20


@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup"])
def test_speculation_takes_a_prefill_and_one_target_forward_per_round(pair, counted, drafter):
    events = run(pair, LaneConfig("speculative", extras=[(drafter, {}), ("greedy_match", {})]))
    rounds = [event for event in events if isinstance(event, Verdict)]
    for model, stream in ((pair.target, "target"), (pair.draft, "draft")):
        assert counted[model.name, "forward"] == sum(
            isinstance(event, Forward) and event.stream == stream for event in events
        )
    assert counted[pair.target.name, "forward"] == 1 + len(rounds) < written(events) / 2
