"""Cache policies with a token budget per head: which slots stay live, compared with the library's own attention, and
the bound for all of them.
"""
from __future__ import annotations

from itertools import pairwise

import pytest
from pairs import pair
from registry import Collapse
from tables import TableModel, watch, write

from playground.contract import make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Cache
from playground.trace.cache_contents import contents
from support.budget_policies import ROW_WISE, TEXT, TIGHT, TREE, cache_positions, roomy, with_policy
from support.eviction import LENGTH, PROMPT, Wrong, alone, course, live_positions, models

BUDGETED = [name for name in TIGHT if "budget_respected" in make(name).guarantee]
every_policy = pytest.mark.parametrize("name, knobs", TIGHT.items(), ids=TIGHT)
ALIKE = {"window": 3, "capacity": 4, "kernel": 3}
COLLAPSES = {
    "pyramidkv": [
        *roomy("pyramidkv", capacity=2048),
        Collapse(with_policy(TREE, "pyramidkv", beta=1, **ALIKE), with_policy(TREE, "snapkv", **ALIKE)),
    ],
    "dapq": roomy("dapq", capacity=2048),
    "prefixkv": roomy("prefixkv", keep=1.0),
    "oracle_keep": [
        *roomy("oracle_keep", size=2048),
        Collapse(with_policy(LaneConfig("beam_search"), "oracle_keep", size=2048), LaneConfig("beam_search")),
    ],
}


@pytest.mark.parametrize("name, knobs", [(name, TIGHT[name]) for name in BUDGETED], ids=BUDGETED)
def test_no_layer_or_head_exceeds_the_budget_however_many_tokens_are_committed(name, knobs):
    budget = make(name, **knobs).budget
    for lane in (LaneConfig("greedy"), TREE):
        found, generated = [], 0
        for state in watch(assemble(with_policy(lane, name, **knobs)), models(), PROMPT, Limits(0, LENGTH), Draws(0)):
            if state.generated > generated:
                generated = state.generated
                found.append(live_positions(state))
                assert max(len(head) for layer in found[-1] for head in layer) <= budget(generated)
        assert max(len(head) for layer in found[0] for head in layer) < len(PROMPT), "the prompt was not cut"
        assert found[0] != found[-1], "nothing changed while the text grew"


@every_policy
def test_a_rejected_draft_token_leaves_no_trace(name, knobs):
    plain = course(alone(make(name, **knobs)), models())
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    assert course(Assembly(decoder, cache_policy=make(name, **knobs)), models()) == plain


@every_policy
def test_chunked_prefill_evicts_what_a_single_prefill_evicts(name, knobs, monkeypatch):
    whole = course(alone(make(name, **knobs)), models())
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", 5)
    monkeypatch.setattr("playground.decoding.stream.forwards.CHUNK", 5)
    assert course(alone(make(name, **knobs)), models()) == whole


@every_policy
@pytest.mark.parametrize("lane", [LaneConfig("greedy"), TREE], ids=lambda lane: lane.strategy)
def test_events_report_live_and_evicted_slots_of_every_layer_and_head(name, knobs, lane):
    session = prepare(pair(), [with_policy(lane, name, **knobs)], Prompt(TEXT), Limits(max_new_tokens=12))
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    held = [cache_positions(cache, live) for cache, live in zip(caches, contents(caches))]
    for (before, after), (old, new) in zip(pairwise(caches), pairwise(held)):
        readable = [head | set(range(before.length, after.length)) for head in old]
        assert all(now <= then for now, then in zip(new, readable))
        assert sum(len(then - now) for now, then in zip(new, readable)) == after.evicted
    assert held[-1] == [head for layer in live_positions(session._runners[0].lane) for head in layer]


def test_lanes_that_share_forwards_retain_what_each_retains_alone():
    configs = [with_policy(LaneConfig("greedy"), name, **knobs) for name, knobs in {**TIGHT, **ROW_WISE}.items()]

    def run(*together: LaneConfig) -> list:
        session = prepare(pair(), list(together), Prompt(TEXT), Limits(max_new_tokens=10))
        shared = sum(getattr(stamped.event, "lanes", 1) > 1 for stamped in session)
        assert bool(shared) == (len(together) > 1)
        return [(runner.lane.tokens, live_positions(runner.lane)) for runner in session._runners]

    alone = [run(config)[0] for config in configs]
    assert [run(*configs[at:at + 4]) for at in (0, 4)] == [alone[0:4], alone[4:8]]


@pytest.mark.parametrize("name, knobs", [(name, TIGHT[name]) for name in BUDGETED], ids=BUDGETED)
def test_a_model_without_attention_weights_keeps_to_the_budget(name, knobs):
    lane = write(alone(make(name, **knobs)), {"target": TableModel("abc")}, [0, 1, 2] * 5, Limits(0, 6), Draws(0))
    assert len(live_positions(lane)[0][0]) <= make(name, **knobs).budget(6)


@pytest.mark.parametrize("name, knobs, says", [
    ("key_norm", dict(size=4, recent=5), "raise size"), ("random_keep", dict(size=4, recent=5), "raise size"),
    ("dapq", dict(capacity=8, recent=9), "raise capacity"),
    ("pyramidkv", dict(window=8, capacity=8), "raise capacity above it"), ("pyramidkv", dict(kernel=4), "take 5"),
])
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(name, knobs, says):
    with pytest.raises(Refusal, match=says) as refusal:
        make(name, **knobs)
    assert str(refusal.value).count(".") == 1
