"""FastKV: which prompt tokens later layers read, what they attend to there, what is retained, and what the
prefill costs.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from pairs import TOKENIZER, network, pair
from registry import Collapse, title
from tables import write
from transformers import DynamicCache, PreTrainedModel

from playground.contract import Full, find, make
from playground.contract.lane_config import Assembly, LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.decoding.session import Models, Prompt, prepare
from playground.engine.forward_input import ForwardInput, LateInput
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Cache, Done, Failed, Figure, Forward, Note
from strategies.kv_cache.fastkv import FastKV
from support.eviction import LENGTH, PROMPT, ByHand, Wrong, alone, course, live_positions, models
from support.kv_caches import exact_softmax
from support.layer_cuts import (
    EARLY,
    TEXT,
    TREE,
    decoder_layers,
    layer_tokens,
    leaning_on_earlier_layers,
    recorded,
    with_policy,
)
from support.wrong_variants import variants_of

BY_HAND = ("llama", "qwen3", "gpt_neox", "gpt2")
EXACT = 1e-9
WINDOW, CAPACITY, KERNEL = 3, 8, 3
# the first of three layers reads everything
KNOBS = dict(window=WINDOW, capacity=CAPACITY, kernel=KERNEL, rate=0.5, depth=0.35)
ONWARD = 11  # of the 22 tokens of PROMPT


def collapsing() -> list[Collapse]:
    """With all tokens selected and a full budget it is a full cache, with a smaller budget SnapKV."""
    room, cut = {"rate": 1.0, "capacity": 2048}, {"window": 3, "capacity": 6, "kernel": 3, "pooling": "max"}
    inside = LaneConfig("greedy", {}, [("dola", {})])
    plain = [
        Collapse(with_policy(lane, "fastkv", depth=depth, **room), lane)
        for lane in (LaneConfig("greedy"), TREE, EARLY, inside)
        for depth in (0.0, 0.5)
    ]
    return [*plain, *[Collapse(with_policy(lane, "fastkv", **all_read, **cut), with_policy(lane, "snapkv", **cut))
                      for lane in (LaneConfig("greedy"), TREE) for all_read in ({"rate": 1.0}, {"depth": 1.0})]]


COLLAPSES = {"fastkv": collapsing()}


# --- the engine: selected tokens in the later layers, recomputed by the library ---


@torch.inference_mode()
def read_by_the_library(
    twin: PreTrainedModel, ids: list[int], places: list[int], entering: tuple[int, torch.Tensor] | None = None
):
    """Its output and cache over tokens at places of a text; what enters one layer may be replaced, [1, n, d], and
    layers before it then mean nothing.
    """
    at, cache, window = torch.tensor(places), DynamicCache(), getattr(twin.config, "sliding_window", None)
    apart = at[:, None] - at
    seen = (apart >= 0) & (apart < window) if window else apart >= 0
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)[None, None]
    twin.set_attn_implementation("eager")
    hook = (
        decoder_layers(twin)[entering[0]].register_forward_pre_hook(lambda _, args: (entering[1], *args[1:]))
        if entering
        else None
    )
    with exact_softmax():
        out = twin(input_ids=torch.tensor([ids]), position_ids=at[None], attention_mask=mask, past_key_values=cache,
                   output_attentions=True, output_hidden_states=True)
    if hook:
        hook.remove()
    return out, cache


def chosen_rows(model: Model, whole: int, onward: list[int], pieces: int = 1, places: list[int] | None = None):
    """The last row once `onward` of the prompt's tokens went on behind the first layers, and the store; at other
    `places` where they are given.
    """
    store = model.new_store()
    _, captured = model.forward(
        [ForwardInput(store, PROMPT, list(range(-1, len(PROMPT) - 1)))],
        LayerPlan(stop=whole, capture=frozenset([whole])),
    )
    store.commit(len(PROMPT) - 1)
    store.evict_from(whole, torch.tensor([[place in onward for place in range(len(PROMPT))]]))
    for part in torch.arange(len(onward)).chunk(pieces):
        tokens, recorded = [PROMPT[onward[i]] for i in part], [(places or onward)[i] for i in part]
        work = LateInput(store, tokens, [], first=int(part[0]), positions=recorded)
        (rows,), _ = model.forward([work], LayerPlan(resume=(whole, captured[whole][[onward[i] for i in part]])))
    return rows[-1], store


SOME = [0, 3, 4, 9, 13, 14, 20, 21]


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    "architecture, whole", [(name, 1) for name in (*BY_HAND, "mistral", "phi3", "qwen2")] + [("llama", 2), ("gpt2", 2)]
)
def test_selected_tokens_attend_to_each_other_at_their_true_positions_only(architecture, whole, pieces):
    twin = network(architecture)
    everything, _ = read_by_the_library(twin, PROMPT, list(range(len(PROMPT))))
    entering = everything.hidden_states[whole][:, SOME]
    expected, cache = read_by_the_library(twin, [PROMPT[place] for place in SOME], SOME, (whole, entering))
    row, store = chosen_rows(pair(architecture).target, whole, SOME, pieces)
    assert (row - expected.logits[0, -1]).abs().max() < EXACT
    assert (row - everything.logits[0, -1]).abs().max() > 1e-3
    for layer in range(whole, store.depth):
        assert (store.keys[layer].read(len(SOME)) - cache.layers[layer].keys[0]).abs().max() < EXACT
        assert (store.values[layer].read(len(SOME)) - cache.layers[layer].values[0]).abs().max() < EXACT


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox", "mistral"])
def test_renumbered_positions_give_other_rows(architecture):
    """In gpt2 positions enter with the embedding, so they are the true ones in any case."""
    right, _ = chosen_rows(pair(architecture).target, 1, SOME)
    wrong, _ = chosen_rows(pair(architecture).target, 1, SOME, places=list(range(len(SOME))))
    assert (right - wrong).abs().max() > 1e-3


@pytest.mark.parametrize(
    "architecture", ["gemma2", "gemma3_text", "olmo2", "cohere", "qwen3_moe", "gpt_neox", "smollm3"]
)
def test_if_all_tokens_are_selected_the_prefill_is_unchanged(architecture):
    model = pair(architecture).target
    (rows,), _ = model.forward([ForwardInput(model.new_store(), PROMPT, list(range(-1, len(PROMPT) - 1)))])
    row, store = chosen_rows(model, 2, list(range(len(PROMPT))), pieces=2)
    assert (row - rows[-1]).abs().max() < EXACT
    assert len(store.slots) == 1


def test_layers_cache_the_tokens_they_read_and_later_tokens_attend_to_those():
    model, whole = pair("llama").target, 2
    _, store = chosen_rows(model, whole, SOME)
    assert store.runs() == [[[(0, 22)]]] * whole + [[[(0, 1), (3, 5), (9, 10), (13, 15), (20, 22)]]] * (
        store.depth - whole
    )
    model.forward([ForwardInput(store, [7], [-1], watch=lambda position: True)])
    assert [weights.shape[2] for weights in store.attention[-1].layers.values()] == [23] * whole + [9] * (
        store.depth - whole
    )


# --- whole texts, by hand with the library alone ---

def smoothed(votes: list[float], window: int, kernel: int, pool: Callable) -> list[float]:
    """Attention scores by slot without the window, each pooled with its neighbours."""
    reach, early = kernel // 2, [*votes[:len(votes) - window], *[0.0] * window]
    padded = [0.0] * reach + early + [0.0] * reach
    return [pool(padded[slot:slot + kernel]) for slot in range(len(votes))]


def best_slots(scores: list[float], window: int, count: int) -> list[int]:
    """The window, and of the slots before it the best up to `count` in all; of equals the later ones."""
    early = sorted(range(len(scores) - window), key=lambda slot: (scores[slot], slot), reverse=True)[
        : max(0, count - window)
    ]
    return sorted([*early, *range(len(scores) - window, len(scores))])


@dataclass
class FastByHand(ByHand):
    """The prompt once through all layers, then the later layers again with the remaining tokens; each layer is cut by
    `rule`.
    """

    whole: int = 1
    pool: Callable = max

    def _feed(self, tokens: list[int]) -> int:
        return super()._feed(tokens) if self.read else self._read(tokens)

    def _read(self, prompt: list[int]) -> int:
        self.read = len(prompt)
        first, early = read_by_the_library(self.network, prompt, list(range(len(prompt))))
        votes = first.attentions[self.whole - 1][0, :, -WINDOW:].sum(1)  # [heads, prompt]
        by_head = votes.unflatten(0, (early.layers[0].keys.shape[1], -1)).sum(1).tolist()
        total = [sum(scores) for scores in zip(*(smoothed(head, WINDOW, KERNEL, self.pool) for head in by_head))]
        self.onward = best_slots(total, WINDOW, ONWARD)
        entering = first.hidden_states[self.whole][:, self.onward]
        out, self.cache = read_by_the_library(
            self.network, [prompt[place] for place in self.onward], self.onward, (self.whole, entering)
        )
        self.cache.layers[:self.whole] = early.layers[:self.whole]
        for layer in range(len(decoder_layers(self.network))):
            seen, places = (first, list(range(len(prompt)))) if layer < self.whole else (out, self.onward)
            self._settle(layer, seen.attentions[layer][0], places)
        return int(out.logits[0, -1].argmax())


def cut(pool: Callable):
    def rule(votes, live, read):
        if read > len(PROMPT):
            return set(live)
        scores = smoothed([votes[place] for place in live], WINDOW, KERNEL, pool)
        return {live[slot] for slot in best_slots(scores, WINDOW, CAPACITY)}
    return rule


def by_hand(architecture: str, whole: int, pool: Callable) -> tuple:
    return FastByHand(architecture, cut(pool), WINDOW, whole=whole, pool=pool).write(PROMPT, LENGTH)


@pytest.mark.oracle("fastkv")
@pytest.mark.parametrize("architecture", BY_HAND)
@pytest.mark.parametrize("depth, whole", [(0.35, 1), (0.7, 2)])
@pytest.mark.parametrize("pooling, pool", [("max", max), ("avg", sum)])
def test_text_and_cache_equal_decoding_by_hand(architecture, depth, whole, pooling, pool):
    ours = course(alone(make("fastkv", **KNOBS | {"depth": depth, "pooling": pooling})), models(architecture))
    assert ours == by_hand(architecture, whole, pool)


def test_later_layers_retain_the_best_of_the_selected_tokens():
    oracle = FastByHand("llama", cut(max), WINDOW)
    oracle.write(PROMPT, 1)
    _, found = course(alone(make("fastkv", **KNOBS)), models())
    assert len(oracle.onward) == ONWARD
    assert all(head <= set(oracle.onward) for layer in found[0][1:] for head in layer)
    assert any(not head <= set(oracle.onward) for head in found[0][0]), "the first layer keeps what it likes"
    assert len({frozenset(head) for layer in found[0] for head in layer}) > 3, "layers and heads choose for themselves"


# --- wrong variants ---

class OneHeadChoosesForAll(FastKV):
    def _pooled(self, held, late):
        return super()._pooled(held, late)[:1]


class TheWindowDoesNotGoOn(FastKV):
    def select_prompt(self, held):
        return super().select_prompt(held) & (held.positions < held.prompt - self.window)


class TheLeastAttendedGoOn(FastKV):
    def select_prompt(self, held):
        late = held.positions >= held.prompt - self.window
        return late | ~super().select_prompt(held)


class NothingIsPooled(FastKV):
    def _pooled(self, held, late):
        return self.attention.of(held.layer, held.positions).masked_fill(late, 0)


class AllGoOn(FastKV):
    def select_prompt(self, held):
        return held.live


class ALayerTooEarly(FastKV):
    def cut_layers(self, layers):
        return [cut - 1 for cut in super().cut_layers(layers)]


class LaterLayersGoByTheVotesOfTheMiddle(FastKV):
    def _pooled(self, held, late):
        return super()._pooled(replace(held, layer=min(held.layer, self.cut_layers(held.layers)[0] - 1)), late)


@pytest.mark.refuses("fastkv")
@pytest.mark.parametrize("wrong", variants_of(FastKV, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_token_selection_is_detected(wrong):
    knobs = KNOBS | {"depth": 0.7}
    expected = by_hand("llama", 2, max)
    assert course(alone(FastKV(**knobs)), models()) == expected
    assert course(alone(wrong(**knobs)), models()) != expected


# --- cost and cache contents ---


@pytest.mark.parametrize("chunk", [128, 7])
@pytest.mark.parametrize(
    "rate, depth, whole", [(0.2, 0.35, 1), (0.5, 0.35, 1), (0.5, 0.7, 2), (1.0, 0.35, 1), (0.2, 1.0, 3)]
)
def test_forwards_report_exactly_the_computed_rows(rate, depth, whole, chunk, monkeypatch):
    monkeypatch.setattr("playground.decoding.stream.WATCHED_CHUNK", chunk)
    monkeypatch.setattr("playground.decoding.stream.CHUNK", chunk)
    recipe = LaneConfig("greedy", {}, [("fastkv", KNOBS | {"rate": rate, "depth": depth})])
    ours, plain = recorded(recipe, Forward), recorded(LaneConfig("greedy"), Forward)
    prompt = layer_tokens(plain) // 3
    onward = int(prompt * rate) if whole < 3 else prompt
    assert layer_tokens(ours) == prompt * whole + onward * (3 - whole)
    assert {forward.phase for forward in ours if forward.layers == 3 and forward.tokens == 1} == {"decode"}
    if onward < prompt:
        assert sum(forward.flops for forward in ours) < sum(forward.flops for forward in plain)
        figure, = recorded(recipe, Figure)
        assert figure.data["values"] == [prompt] * whole + [onward] * (3 - whole)
        assert any(f"{layer_tokens(ours)} token-layer computations" in note.text for note in recorded(recipe, Note))


def test_computed_tokens_and_retained_slots_have_separate_knobs():
    """The rate changes the cost of the prefill and not the cache; the capacity the other way round."""
    def costs(**knobs) -> tuple[int, int]:
        recipe = LaneConfig("greedy", {}, [("fastkv", KNOBS | knobs)])
        return layer_tokens(recorded(recipe, Forward)), recorded(recipe, Cache)[0].bytes

    read, held = costs()
    assert costs(rate=1.0)[0] > read and costs(rate=1.0)[1] == held
    assert costs(capacity=6)[0] == read and costs(capacity=6)[1] < held


@pytest.mark.parametrize("rate, room", [(0.5, 8), (0.5, 11), (0.5, 15), (0.25, 15), (1.0, 22), (0.05, 8)])
def test_each_layer_retains_up_to_its_budget_of_what_it_read(rate, room):
    policy = make("fastkv", **KNOBS | {"rate": rate, "capacity": room})
    _, found = course(alone(policy), models())
    read = max(WINDOW, int(22 * rate))
    assert [[len(head) for head in layer] for layer in found[0]] == [
        [min(room, count)] * 2 for count in (22, read, read)
    ]
    assert policy.expected_share(Full(22, 0, 3, 2, 8, 64)) == pytest.approx(
        sum(len(head) for layer in found[0] for head in layer) / (22 * 6)
    )


@pytest.mark.parametrize("tokens, prompt", [(48, 240), (100, 240), (7, 9), (512, 20), (33, 100)])
def test_a_token_budget_selects_at_least_that_many_tokens(tokens, prompt):
    policy = make("fastkv", **find("fastkv").knobs_for_budget(tokens, prompt))
    assert policy.expected_share(Full(prompt, 0, 6, 2, 8, 32)) * prompt == pytest.approx(min(tokens, prompt))


# --- combinations with other strategies ---

def test_chunked_prefill_equals_a_single_prefill(monkeypatch):
    whole = course(alone(make("fastkv", **KNOBS)), models())
    monkeypatch.setattr("playground.decoding.stream.WATCHED_CHUNK", 5)
    monkeypatch.setattr("playground.decoding.stream.CHUNK", 5)
    assert course(alone(make("fastkv", **KNOBS)), models()) == whole


BESIDE = [
    LaneConfig("greedy", {}, [("dola", {})]),
    LaneConfig("greedy", {}, [("knn_lm", {"tokens": 16})]),
    LaneConfig("greedy", {}, [("lol", {})]),
    EARLY,
    TREE,
    LaneConfig("greedy", {}, [("regex", {"pattern": "The bird [a-z ]{6,20}"})]),
    LaneConfig("sample"),
]


@pytest.mark.parametrize("lane", BESIDE, ids=title)
def test_early_exits_hidden_states_and_second_streams_are_unaffected(lane, monkeypatch):
    """In pieces of five tokens, so that what was captured of the last row comes from several forwards; a grammar forces
    its first words.
    """
    monkeypatch.setattr("playground.decoding.stream.WATCHED_CHUNK", 5)
    texts = []
    for knobs in ({"rate": 1.0, "capacity": 2048}, KNOBS):
        session = prepare(pair(), [lane, with_policy(lane, "fastkv", **knobs)], Prompt(TEXT), Limits(max_new_tokens=8))
        assert not [stamped.event for stamped in session if isinstance(stamped.event, Failed)]
        texts.append([runner.lane.tokens for runner in session._runners])
    assert texts[0][0] == texts[0][1]
    assert texts[1][0] == texts[0][0] and len(texts[1][1]) > len(session.headers[0].prompt_ids)


@pytest.mark.parametrize("knobs", [{"rate": 1.0}, {"depth": 1.0}], ids=str)
@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_if_all_layers_read_everything_it_is_snapkv(knobs, pooling):
    shared = {"window": WINDOW, "capacity": CAPACITY, "kernel": KERNEL, "pooling": pooling}
    expected = course(alone(make("snapkv", **shared)), models())
    assert course(alone(make("fastkv", **shared, **knobs)), models()) == expected
    assert course(alone(make("fastkv", **shared, rate=0.5)), models()) != expected


def test_a_rejected_draft_token_leaves_no_trace():
    plain = course(alone(make("fastkv", **KNOBS)), models())
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    assert course(Assembly(decoder, cache_policy=make("fastkv", **KNOBS)), models()) == plain


def test_a_fork_does_not_change_what_is_evicted():
    ids, plain = course(alone(make("fastkv", **KNOBS)), models())
    forked, found = course(alone(make("fastkv", **KNOBS)), models(), forced=tuple(ids[:4]))
    assert forked[:4] == ids[:4]
    early = [
        [[{p for p in head if p < len(PROMPT)} for head in layer] for layer in held[-1]] for held in (found, plain)
    ]
    assert early[0] == early[1]


def test_other_lanes_are_unaffected():
    def texts(*recipes: LaneConfig) -> list[tuple]:
        session = prepare(pair(), list(recipes), Prompt(TEXT), Limits(max_new_tokens=8))
        assert all(stamped.event.reason == "length" for stamped in session if isinstance(stamped.event, Done))
        return [(runner.lane.tokens, live_positions(runner.lane)) for runner in session._runners]

    recipes = [
        LaneConfig("greedy"),
        LaneConfig("greedy", {}, [("fastkv", KNOBS)]),
        TREE,
        with_policy(TREE, "fastkv", **KNOBS | {"rate": 0.25}),
    ]
    assert texts(*recipes) == [texts(recipe)[0] for recipe in recipes]


def test_a_prompt_shorter_than_the_window_is_read_by_all_layers():
    both = [
        write(alone(policy), models(), PROMPT[:2], Limits(0, 6), Draws(0)).tokens
        for policy in (make("fastkv", **KNOBS), make("snapkv"))
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    "knobs, says", [(dict(window=8, capacity=8), "raise capacity above it"), (dict(kernel=4), "take 5")]
)
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(knobs, says):
    with pytest.raises(Refusal, match=says):
        make("fastkv", **knobs)


def test_a_model_without_split_layers_is_refused_unless_all_layers_read_everything():
    leaning = Models(Model(leaning_on_earlier_layers(), TOKENIZER, "leaning"))
    refused, served = (
        [
            stamped.event
            for stamped in prepare(
                leaning, [LaneConfig("greedy", {}, [("fastkv", {"depth": depth})])], Prompt(TEXT), Limits()
            )
        ][-1]
        for depth in (0.5, 1.0)
    )
    assert isinstance(refused, Failed)
    assert "cannot shorten the prompt for them: remove Part of the prompt for later layers (FastKV)" in refused.message
    assert isinstance(served, Done)


@pytest.mark.parametrize("architecture", [*BY_HAND, "gemma2", "mistral", "qwen3_moe"])
def test_a_model_with_split_layers_is_accepted(architecture):
    assert pair(architecture).target.splits
