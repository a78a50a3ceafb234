"""Cache policies that compress a prompt once: layer budgets and pseudo-answers, against the library's attention."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from pairs import network, pair
from tables import watch, write

from playground.contract import Held, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.events import Cache, Figure
from playground.trace.cache_contents import contents
from strategies.kv_cache.dapq import DapQ
from strategies.kv_cache.prefixkv import PrefixKV, level
from strategies.kv_cache.pyramidkv import PyramidKV
from support.budget_policies import BY_HAND, TEXT, TIGHT, TREE, HandRule, Seen, best, cache_positions, with_policy
from support.eviction import LENGTH, PROMPT, alone, course, live_positions, models
from support.wrong_variants import variants_of

# --- a pyramid ---


def by_the_paper(layers: int, prompt: int, window: int, capacity: int, beta: int) -> list[float]:
    """Tokens of a prompt beyond the capacity that each layer retains, before rounding, as the authors' code
    computes them: below twice the capacity without the window it is SnapKV.
    """
    if prompt < 2 * (capacity - window):
        return [capacity] * layers
    least = (capacity - window) / beta
    most = 2 * (capacity - window) - least
    if most > prompt - window:
        most = prompt - window
        least = 2 * (capacity - window) - most
    return [most - layer * (most - least) / (layers - 1) + window for layer in range(layers)]


def of_layer(layer: int, layers: int, prompt: int) -> Held:
    return Held(layer, layers, "prefill", prompt, prompt, torch.arange(prompt)[None], read=None)


def shares(policy: PyramidKV, layers: int, prompt: int) -> list[int]:
    return [policy.share(of_layer(layer, layers, prompt)) + policy.window for layer in range(layers)]


PYRAMIDS = [
    (6, 200, 8, 40, 20),
    (6, 200, 8, 40, 1),
    (3, 22, 3, 9, 3),
    (32, 4000, 16, 128, 10),
    (5, 50, 8, 40, 20),
    (2, 41, 8, 40, 40),
    (8, 95, 16, 64, 20),
    (8, 96, 16, 64, 20),
]


@pytest.mark.oracle("pyramidkv")
@pytest.mark.parametrize("layers, prompt, window, capacity, beta", PYRAMIDS)
def test_pyramid_budgets_are_the_papers_and_average_to_the_capacity(
    layers, prompt, window, capacity, beta
):
    found = shares(make("pyramidkv", window=window, capacity=capacity, beta=beta), layers, prompt)
    assert all(
        abs(ours - theirs) <= 0.5 for ours, theirs in zip(found, by_the_paper(layers, prompt, window, capacity, beta))
    )
    assert abs(sum(found) / layers - capacity) <= 0.5
    assert found == sorted(found, reverse=True) and found[0] <= prompt


@pytest.mark.parametrize("prompt, uneven", [(41, False), (71, False), (72, True), (500, True)])
def test_layers_get_different_budgets_once_the_prompt_is_twice_the_capacity_without_the_window(prompt, uneven):
    found = shares(make("pyramidkv", window=4, capacity=40), 6, prompt)
    assert (len(set(found)) > 1) == uneven and abs(sum(found) / 6 - 40) <= 0.5


@pytest.mark.parametrize("prompt", [5, 30, 40])
def test_every_layer_retains_a_prompt_within_the_capacity(prompt):
    assert min(shares(make("pyramidkv", window=4, capacity=40), 6, prompt)) >= prompt


def test_a_model_of_one_layer_has_the_capacity():
    assert shares(make("pyramidkv", window=4, capacity=40), 1, 200) == [40]


class UpsideDown(PyramidKV):
    def share(self, held):
        return super().share(replace(held, layer=held.layers - 1 - held.layer))


class AsWideAsItLikes(PyramidKV):
    def share(self, held):
        return super().share(replace(held, prompt=10 ** 6))


@pytest.mark.refuses("pyramidkv")
@pytest.mark.parametrize("wrong", variants_of(PyramidKV, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_pyramid_is_detected(wrong):
    found = [
        abs(ours - theirs)
        for layers, prompt, window, capacity, beta in PYRAMIDS
        for ours, theirs in zip(
            shares(wrong(window, capacity, beta=beta), layers, prompt),
            by_the_paper(layers, prompt, window, capacity, beta),
        )
    ]
    assert max(found) > 0.5


@pytest.mark.oracle("pyramidkv")
@pytest.mark.parametrize("architecture", BY_HAND)
def test_every_layer_of_a_pyramid_retains_its_best_slots_and_generated_tokens(architecture):
    counts, window = [13, 9, 5], 3

    def rule(seen):
        if seen.read > len(PROMPT):
            return [set(live) for live in seen.live]
        votes = seen.weights[:, -window:].unflatten(0, (len(seen.live), -1)).sum((1, 2)).tolist()
        early = [dict(zip(live[:-window], head)) for live, head in zip(seen.live, votes)]
        return [best(head, counts[seen.layer] - window) | set(seen.live[0][-window:]) for head in early]

    expected = HandRule(architecture, rule).write(PROMPT, LENGTH)
    assert (
        course(alone(make("pyramidkv", window=window, capacity=9, beta=3, kernel=1)), models(architecture)) == expected
    )
    assert [{len(head) for head in layer} for layer in expected[1][-1]] == [{count + LENGTH - 1} for count in counts]


def test_the_figure_of_a_pyramid_shows_the_slots_of_its_layers():
    session = prepare(
        pair(), [with_policy(TREE, "pyramidkv", **TIGHT["pyramidkv"])], Prompt(TEXT), Limits(max_new_tokens=8)
    )
    events = [stamped.event for stamped in session]
    (figure,) = [event for event in events if isinstance(event, Figure) and event.name == "prompt tokens kept"]
    first = next(event for event in events if isinstance(event, Cache))
    held = cache_positions(first, next(contents([first])))
    assert figure.data["values"] == [len(held[layer * first.heads]) for layer in range(first.layers)] == [13, 9, 5]


# --- a pseudo-answer ---

@torch.inference_mode()
def cast_by(architecture: str, pretended: list[int]) -> list[torch.Tensor]:
    """Attention the prompt gets from tokens that follow it, summed over them, by layer [heads, prompt]."""
    library = network(architecture)
    library.set_attn_implementation("eager")
    layers = library(input_ids=torch.tensor([PROMPT + pretended]), use_cache=False, output_attentions=True).attentions
    return [weights[0, :, len(PROMPT):, :len(PROMPT)].sum(1) for weights in layers]


def by_the_answer(
    architecture: str, pretended: list[int], capacity: int, recent: int = 0
) -> Callable[[Seen], list[set[int]]]:
    """The prompt is compressed by what such an answer would attend to; the rest is unchanged."""
    votes, cut = cast_by(architecture, pretended), len(PROMPT) - recent

    def rule(seen):
        if seen.read > len(PROMPT):
            return [set(live) for live in seen.live]
        heads = votes[seen.layer].unflatten(0, (len(seen.live), -1)).sum(1).tolist()
        return [best(dict(enumerate(head[:cut])), capacity - recent) | set(range(cut, len(PROMPT))) for head in heads]
    return rule


REHEARSED = [
    (dict(pretending=6, first=2), PROMPT[:2] + PROMPT[-4:]),
    (dict(pretending=1, first=0), PROMPT[-1:]),
    (dict(pretending=3, first=8), PROMPT[:3]),
    (dict(pretending=4, content="repeated"), PROMPT[-1:] * 4),
    (dict(pretending=128), PROMPT),
    (dict(pretending=5, recent=4), PROMPT[:2] + PROMPT[-3:]),
]


@pytest.mark.oracle("dapq")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("knobs, pretended", REHEARSED, ids=lambda value: str(value)[:40])
def test_dapq_retains_what_its_pseudo_answer_attends_to_and_discards_that_answer(
    architecture, knobs, pretended
):
    expected = HandRule(architecture, by_the_answer(architecture, pretended, 9, knobs.get("recent", 0))).write(
        PROMPT, LENGTH
    )
    assert make("dapq", capacity=9, **knobs).probe_tokens(PROMPT) == pretended
    assert course(alone(make("dapq", capacity=9, **knobs)), models(architecture)) == expected


class TheFirstOneSpeaksForAll(DapQ):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights[:, :1], key_positions)


class OnlySharesOfThePromptCount(DapQ):
    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights / weights.sum(-1, keepdim=True), key_positions)


class TheStartLendsTheMost(DapQ):
    def probe_tokens(self, text):
        return text[:self.pretending - self.first] + text[-self.first:]


class ReadOnePlaceLate(DapQ):
    """The right tokens, but after one more of them."""

    def probe_tokens(self, text):
        return super().probe_tokens(text)[:1] + super().probe_tokens(text)


@pytest.mark.refuses("dapq")
@pytest.mark.parametrize("wrong", variants_of(DapQ, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_pseudo_answer_is_detected(wrong):
    expected = HandRule("llama", by_the_answer("llama", PROMPT[:2] + PROMPT[-6:], 9)).write(PROMPT, LENGTH)
    assert course(alone(DapQ(capacity=9, pretending=8)), models()) == expected
    assert course(alone(wrong(capacity=9, pretending=8)), models()) != expected


def test_a_pseudo_answer_stays_within_the_context_and_a_short_prompt_needs_none():
    model = models("gpt2")["target"]
    long = [7, 9, 54] * (model.context // 3)
    lane = write(alone(make("dapq", capacity=16)), models("gpt2"), long[:model.context - 3], Limits(0, 50), Draws(0))
    assert (lane.generated, lane.reason) == (3, "length")
    assert make("dapq", capacity=9).probe_tokens(PROMPT[:9]) == [] != make("dapq", capacity=9).probe_tokens(PROMPT[:10])


def test_a_fork_places_its_pseudo_answer_after_the_prefix():
    _, found = course(alone(make("dapq", capacity=9)), models(), forced=(5, 6, 7))
    given = set(range(len(PROMPT), len(PROMPT) + 3))
    assert all(
        given <= head and len([p for p in head if p < len(PROMPT)]) == 9 for layer in found[-1] for head in layer
    )


# --- one retained share for all layers ---

def uneven(layers: int, length: int, seed: int = 0) -> torch.Tensor:
    """Attention scores of layers with increasingly concentrated attention, [layers, length]."""
    votes = torch.rand(layers, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return votes ** torch.arange(1, layers + 1)[:, None]


def curves(votes: torch.Tensor) -> list[list[float]]:
    """Share of a layer's attention that its best n tokens have, n from 0."""
    return [
        [sum(sorted(layer, reverse=True)[:n]) / sum(layer) for n in range(len(layer) + 1)] for layer in votes.tolist()
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gone", [0, 20, 100, 180])
def test_every_layer_reaches_the_level_with_the_fewest_tokens(gone, seed):
    votes = uneven(4, 50, seed)
    kept, shares_at = level(votes, gone), curves(votes)
    reached = min(shares[n] for shares, n in zip(shares_at, kept))
    missed = max(shares[n - 1] for shares, n in zip(shares_at, kept))
    assert missed <= reached + 1e-12
    assert abs(4 * 50 - sum(kept) - gone) < 5
    assert kept[0] > kept[-1] or gone == 0, "a layer that gathers its attention needs fewer"


@pytest.mark.parametrize("gone", [9, 18, 27])
def test_no_other_split_gives_the_worst_layer_a_larger_share(gone):
    votes = uneven(3, 12, 1)
    kept, shares_at = level(votes, gone), curves(votes)

    def poorest(division):
        return min(shares[n] for shares, n in zip(shares_at, division))

    others = [(a, b, sum(kept) - a - b) for a in range(13) for b in range(13) if 0 <= sum(kept) - a - b <= 12]
    assert len(others) > 20 and poorest(kept) >= max(map(poorest, others)) - 1e-12


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
