"""Heavy hitters (H2O): what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from pairs import pair
from registry import unchanged_by

from playground.algorithms.kv_cache.attention_scores import top_slots
from playground.contract import make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Cache
from playground.trace.cache_contents import contents
from strategies.kv_cache.h2o import H2O
from support.eviction import BY_HAND, LENGTH, PROMPT, ByHand, Wrong, alone, course, heavy_hitters, models, stays
from support.wrong_variants import variants_of

COLLAPSES = {"h2o": unchanged_by("h2o", heavy=0, recent=1024) + unchanged_by("h2o", heavy=1024, recent=0)}


# --- by hand, with the library alone ---

@pytest.mark.oracle("h2o")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("heavy, recent", [(5, 4), (8, 0), (3, 9), (0, 6)])
def test_h2o_text_and_cache_equal_decoding_by_hand(architecture, heavy, recent):
    expected = ByHand(architecture, heavy_hitters(heavy, recent)).write(PROMPT, LENGTH)
    assert course(alone(make("h2o", heavy=heavy, recent=recent)), models(architecture)) == expected
    assert all(len(head) == heavy + recent for held in expected[1] for layer in held for head in layer)


# --- wrong variants ---

class OnlyTheLastRowVotes(H2O):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention._layers.pop(layer, None)
        self.attention.add(layer, weights[:, -1:], key_positions)


class ThePromptHasNoVote(H2O):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights if len(query_positions) == 1 else weights[:, :0], key_positions)


class VotesAreMeans(H2O):
    def scores(self, held):
        return super().scores(held) / (held.next - held.positions)


class OneHeadSpeaksForAll(H2O):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights[:1].expand_as(weights), key_positions)


class RecentTokensTakePlacesOfHeavyOnes(H2O):
    def retain_all(self, held):
        return [
            (layer.positions >= layer.next - self.recent) | top_slots(self.scores(layer), self.heavy, layer.live)
            for layer in held
        ]


class PositionsAreSlots(H2O):
    """Counts by slot index, which changes when an earlier slot is evicted."""

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights, torch.arange(key_positions.shape[1])[None])

    def scores(self, held):
        return self.attention.of(held.layer, torch.arange(held.positions.shape[1])[None])


@pytest.mark.refuses("h2o")
@pytest.mark.parametrize("wrong", variants_of(H2O, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_attention_score_is_detected(wrong):
    _, expected = ByHand("llama", heavy_hitters(12, 7)).write(PROMPT, LENGTH)
    assert course(alone(H2O(heavy=12, recent=7)), models())[1] == expected
    assert course(alone(wrong(heavy=12, recent=7)), models())[1] != expected


# --- attention scores, in small worked examples ---

def test_h2o_retains_heavy_hitters_of_each_head_and_recent_tokens():
    policy = make("h2o", heavy=2, recent=2)
    policy.observe_attention(
        0, torch.tensor([[[4, 1, 2, 3, 9, 9]], [[1, 2, 2, 2, 9, 9]]]).float(), torch.tensor([5]), torch.arange(6)[None]
    )
    assert stays(policy, [[0, 1, 2, 3, 4, 5]], 6) == [[0, 3, 4, 5], [2, 3, 4, 5]]
    assert stays(policy, [[0, 3, 4, 5, 6], [2, 3, 4, 5, 6]], 7) == [[0, 4, 5, 6], [3, 4, 5, 6]]


# --- effects on a lane ---

@pytest.mark.parametrize("decoder", ["greedy", "speculative"])
def test_events_report_evicted_slots_and_memory_decreases(decoder):
    config = LaneConfig(decoder, {}, [("h2o", {"heavy": 5, "recent": 3})])
    session = prepare(
        pair(), [config], Prompt("The green bird sings, and the red fox listens."), Limits(max_new_tokens=12)
    )
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    store = session._runners[0].lane.target.store
    whole = len(session.headers[0].prompt_ids) * store.depth * store.heads
    assert caches[0].evicted == whole - 8 * store.depth * store.heads
    # 8 slots of 8 numbers of 8 bytes
    assert {cache.bytes for cache in caches} == {2 * store.depth * store.heads * 8 * 8 * 8}
    live = list(contents(caches))
    assert all(sum(stop - start for start, stop in head) == 8 for held in live for layer in held for head in layer)
    assert len(live[-1]) == store.depth and len(live[-1][0]) == store.heads


def test_a_rejected_draft_token_adds_no_attention_score():
    """Speculation with rejected drafts retains what plain decoding retains, whatever the draft tokens attended to."""
    plain = course(alone(make("h2o", heavy=5, recent=4)), models())
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    assert course(Assembly(decoder, cache_policy=make("h2o", heavy=5, recent=4)), models()) == plain
