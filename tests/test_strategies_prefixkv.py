"""One level for all layers (PrefixKV): what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pairs import network
from tables import watch

from playground.contract import make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from strategies.kv_cache.prefixkv import PrefixKV
from support.budget_policies import BY_HAND, TREE, HandRule, Seen, with_policy
from support.eviction import LENGTH, PROMPT, alone, course, live_positions, models, uneven
from support.wrong_variants import variants_of


@pytest.mark.parametrize("keep, sinks", [(0.05, 1), (0.5, 0), (0.5, 8), (0.8, 1), (1.0, 1)])
def test_the_layers_evicted_tokens_add_up(keep, sinks):
    forgotten = make("prefixkv", keep=keep, sinks=sinks).counts(uneven(5, 60))
    assert sum(forgotten) == min(round((1 - keep) * 300), 5 * (59 - sinks))
    assert all(0 <= count <= 59 - sinks for count in forgotten)


@torch.inference_mode()
def received(architecture: str) -> torch.Tensor:
    """Attention every token of the prompt gets from all of it, over all heads, [layers, prompt]."""
    library = network(architecture)
    library.set_attn_implementation("eager")
    layers = library(input_ids=torch.tensor([PROMPT]), use_cache=False, output_attentions=True).attentions
    return torch.stack([weights[0].sum((0, 1)) for weights in layers])


def one_level(architecture: str, policy: PrefixKV) -> Callable[[Seen], list[set[int]]]:
    """The prompt is cut by what it attends to; then, token by token, the oldest of the tail goes where the layer holds
    more than its ratio.
    """
    votes, length = received(architecture), len(PROMPT)
    forgotten = policy.counts(votes)

    def rule(seen):
        live, gone = seen.live[0], forgotten[seen.layer]
        if seen.read == length:
            candidates = {
                p: -vote for p, vote in enumerate(votes[seen.layer].tolist()) if policy.sinks <= p < length - 1
            }
            worst = sorted(candidates, key=lambda p: (candidates[p], -p), reverse=True)[:gone]
            return [set(live) - set(worst)] * len(seen.live)
        oldest = length - gone - policy.tail if length - gone > policy.tail else (length - gone) // 2
        surplus = len(live) > seen.read * (1 - gone / length) + 1 - 1e-9
        return [set(live) - ({live[oldest]} if surplus else set())] * len(seen.live)
    return rule


@pytest.mark.oracle("prefixkv")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize(
    "knobs", [dict(keep=0.5, tail=4), dict(keep=0.3, tail=25, sinks=0), dict(keep=0.75, tail=1, sinks=3)], ids=str
)
def test_prefixkv_text_and_cache_equal_decoding_by_hand(architecture, knobs):
    policy = make("prefixkv", **knobs)
    expected = HandRule(architecture, one_level(architecture, policy)).write(PROMPT, LENGTH)
    assert course(alone(policy), models(architecture)) == expected


@pytest.mark.parametrize("lane", [LaneConfig("greedy"), TREE], ids=lambda lane: lane.strategy)
def test_every_layer_keeps_its_ratio_as_the_text_grows(lane):
    generated = 0
    for state in watch(
        assemble(with_policy(lane, "prefixkv", keep=0.4, tail=6)), models(), PROMPT, Limits(0, 30), Draws(0)
    ):
        if state.generated > generated:
            generated, read = state.generated, state.target.store.length
            for forgotten, heads in zip(state.assembly.cache_policy._evicted, live_positions(state)):
                wanted = read * (1 - forgotten / len(PROMPT))
                assert all(-1e-9 < len(head) - wanted < 1 for head in heads)
    assert generated == 30


class EveryLayerTheSame(PrefixKV):
    def counts(self, votes):
        return [sum(super().counts(votes)) // len(votes)] * len(votes)


class TheNewestGoes(PrefixKV):
    def _evict_tail(self, held):
        return super()._evict_tail(held).flip(1)


class TheBeginningIsNotSafe(PrefixKV):
    def _evict_prompt(self, held):
        safe, self.sinks = self.sinks, 0
        kept = super()._evict_prompt(held)
        self.sinks = safe
        return kept


class TheLastRowVotes(PrefixKV):
    def wants_attention(self, position, prompt):
        return position == prompt - 1


@pytest.mark.refuses("prefixkv")
@pytest.mark.parametrize("wrong", variants_of(PrefixKV, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_level_is_detected(wrong):
    found = []
    for knobs in (dict(keep=0.75, sinks=3, tail=4), dict(keep=0.3, sinks=8, tail=4)):
        _, expected = HandRule("llama", one_level("llama", PrefixKV(**knobs))).write(PROMPT, LENGTH)
        assert course(alone(PrefixKV(**knobs)), models())[1] == expected
        found.append(course(alone(wrong(**knobs)), models())[1] != expected)
    assert any(found)
