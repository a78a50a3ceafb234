"""Effects of merging on a lane, for every merging policy."""
from __future__ import annotations

import pytest
import torch
from pairs import pair
from tables import TableModel, watch, write
from torch import Tensor

from playground.contract import CachePolicy, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Cache
from playground.trace import check
from playground.trace.cache_contents import read_layers
from support.budget_policies import TEXT, TREE, with_policy
from support.ems_settings import EMS_TIGHT
from support.eviction import LENGTH, PROMPT, Wrong, alone, live_positions, models
from support.merging_policies import D2O_TIGHT, NEAR, room, the_same
from support.slot_meetings import by_loop, slots

TIGHT = {"d2o": D2O_TIGHT, "ems": EMS_TIGHT}
each = pytest.mark.parametrize("name", TIGHT)


@each
@pytest.mark.parametrize("config", [LaneConfig("greedy"), TREE, LaneConfig("sample")], ids=["greedy", "tree", "sample"])
def test_a_lane_reports_merged_tokens_and_their_targets(name, config):
    session = prepare(pair(), [with_policy(config, name, **TIGHT[name])], Prompt(TEXT), Limits(max_new_tokens=10))
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    assert check(session.trace) == []
    recorded = [cache for cache in caches if cache.merged]
    evicted = [read_layers(cache.dropped) for cache in recorded]
    merged = [sum(into is not None for layer in layers for head in layer for *_, into in head) for layers in evicted]
    assert recorded and merged == [cache.merged for cache in recorded]
    assert len(evicted[0]) == recorded[0].layers and len(evicted[0][0]) == recorded[0].heads


@each
def test_a_rejected_draft_token_is_merged_into_nothing(name):
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    speculative = room(Assembly(decoder, cache_policy=make(name, **TIGHT[name])))
    assert the_same(speculative, room(alone(make(name, **TIGHT[name]))))


@each
def test_merged_values_lie_between_their_sources(name):
    plain = room(alone(make("h2o", heavy=1024)))
    bounds = [(rows.amin(1), rows.amax(1)) for rows in plain.rows[3:]]
    for (low, high), rows in zip(bounds, before_generating(make(name, **{**TIGHT[name]}))):
        assert (rows >= low[:, None] - NEAR).all() and (rows <= high[:, None] + NEAR).all()


def before_generating(policy: CachePolicy) -> list[Tensor]:
    """Values of the prompt's slots, by layer, after the first eviction; the texts of two lanes may differ later."""
    for lane in watch(alone(policy), models(), PROMPT, Limits(0, LENGTH), Draws(0)):
        store = lane.target.store
        if store.live_slots() < store.depth * store.heads * store.length:
            break
    return [store.values[layer].read(store.slots_of(layer).count) for layer in range(store.depth)]


@each
@pytest.mark.parametrize("weights", ["paper", "released"])
def test_merging_a_duplicate_leaves_its_target_unchanged(name, weights):
    keys = torch.tensor([[[1.0, 2.0], [1.0, 2.0], [5.0, -1.0], [0.0, 3.0]]])
    policy = make("d2o", weights=weights) if name == "d2o" else make("ems", size=19, likeness=0.9)
    held = of_keys(keys)
    stays = policy.retain(held) if name == "ems" else slots([0, 1, 1, 1]).bool()
    merge = policy.merge(held, stays, ~stays)
    assert [slot.tolist() for _, slot in (merge.merge_map.sources, merge.merge_map.targets)] == [[0], [1]]
    assert (by_loop(keys, merge)[0, 1] - keys[0, 1]).abs().max() < 1e-6


def of_keys(keys: Tensor):
    from playground.contract import Held
    count = keys.shape[1]
    return Held(0, 1, "keep", count, count + 20, torch.arange(count)[None], read=lambda part: keys)


@each
def test_chunked_prefill_merges_what_a_single_prefill_merges(name, monkeypatch):
    whole = room(alone(make(name, **TIGHT[name])))
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", 5)
    assert the_same(room(alone(make(name, **TIGHT[name]))), whole)


@each
def test_a_model_without_attention_weights_decodes(name):
    lane = write(alone(make(name, **TIGHT[name])), {"target": TableModel("abc")}, [0, 1, 2] * 8, Limits(0, 6), Draws(0))
    assert lane.generated == 6 and len(live_positions(lane)[0][0]) < 24


@pytest.mark.parametrize("knobs, says", [(dict(size=16, window=16), "raise size above it"), (dict(kernel=4), "take 5")])
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(knobs, says):
    with pytest.raises(Refusal, match=says) as refusal:
        make("ems", **knobs)
    assert str(refusal.value).count(".") == 1
