"""KVzap: the tokens that kvpress drops, a run by hand on the library's states, the scores it is fitted to, and wrong
variants.
"""
from __future__ import annotations

import json

import pytest
import torch
from pairs import network, pair
from registry import Collapse
from tables import watch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

import playground
from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache.ridge import RidgeSums
from playground.contract import Full, Held, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.fitted_weights import stored
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.training.calibration import CalibrationTexts, world_texts
from strategies.kv_cache import kvzap
from support.budget_policies import roomy, with_policy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.kv_caches import exact_softmax
from support.kvpress_scores import OUT, READ, THRESHOLDS, TOKENS, WINDOW, predicted, scale
from support.wrong_variants import variants_of

KVzap = find("kvzap")
COLLAPSES = {
    "kvzap": [
        *roomy("kvzap", threshold=-30.0), *roomy("kvzap", window=1024),
        Collapse(with_policy(LaneConfig("greedy"), "kvzap"), LaneConfig("greedy")),
    ]
}
REFERENCE = json.loads(OUT.read_text(encoding="utf-8"))["kvzap"]
KNOBS = {"threshold": 0.2, "window": 4}


def fitted(cls: type = KVzap, kind: str = "llama", **knobs):
    """A policy with a random map for the test network, which drops about half."""
    policy = cls(**{**KNOBS, **knobs})
    policy.begin_fitted(maps(kind))
    return policy


def maps(kind: str = "llama") -> dict[str, Tensor]:
    parts = pair(kind).target.parts
    heads = len(parts.attention_projections(0).key) // network(kind).config.head_dim
    weight = torch.randn(parts.depth, heads, parts.width, generator=torch.Generator().manual_seed(3)) / 5
    return {"weight": weight, "bias": torch.zeros(parts.depth, heads), "quantiles": torch.linspace(-1, 1, 101)}


# --- the library's tokens ---


def dropped(policy, text: int) -> list[list[int]]:
    """The tokens that each head has dropped of a text of so many tokens."""
    slots = Held(0, 1, "keep", READ, text, torch.arange(text)[None], read=None)
    return [(~head).nonzero().flatten().tolist() for head in policy.retain(slots)]


def check_kvpress(cls: type) -> None:
    cases = [(threshold, decoding) for threshold in THRESHOLDS for decoding in (True, False)]
    for (threshold, decoding), expected in zip(cases, REFERENCE):
        policy = cls(threshold=threshold * scale(), window=WINDOW, decoding=decoding)
        for text, each in zip(range(READ, TOKENS + 1), expected):
            policy._scores[0] = predicted()[:, :text]
            assert dropped(policy, text) == each


@pytest.mark.oracle("kvzap")
def test_dropped_tokens_are_those_of_kvpress():
    check_kvpress(KVzap)


# --- by hand, with the library's states ---


@torch.inference_mode()
def by_hand() -> tuple[list[int], list[list[list[set[int]]]]]:
    """Tokens and live positions: the library reads the whole text for each token, and a mask hides dropped tokens."""
    model, weight, text = network("llama").to(torch.float64), maps()["weight"].double(), list(PROMPT)

    def note(module, args, given):
        module.low = weight[module.layer_idx] @ given["hidden_states"][0].T < KNOBS["threshold"]

    def attend(module, query, key, value, mask, **others):
        rows, slots = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
        gone = (slots < rows - KNOBS["window"]) & (rows >= len(PROMPT)) & module.low[:, None]
        seen = ((rows >= slots) & ~gone).repeat_interleave(2, 0)[None]
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        return scaled_dot_product_attention(query, key, value, seen).transpose(1, 2), None

    AttentionInterface.register("without unimportant tokens", attend)
    model.set_attn_implementation("without unimportant tokens")
    modules = [layer.self_attn for layer in model.model.layers]
    for module in modules:
        module.register_forward_pre_hook(note, with_kwargs=True)
    held = []
    while len(text) < len(PROMPT) + LENGTH:
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        held.append([[kept(head) for head in module.low.tolist()] for module in modules])
    return text[len(PROMPT):], held


def kept(low: list[bool]) -> set[int]:
    """The positions of a head that stay, given which of all tokens read are unimportant."""
    return {p for p, each in enumerate(low) if not each or p >= len(low) - KNOBS["window"]}


def check_run(cls: type) -> None:
    assert course(alone(fitted(cls)), models()) == by_hand()


@pytest.mark.oracle("kvzap")
def test_text_and_cache_equal_those_of_the_librarys_states():
    check_run(KVzap)
    counts = {len(head) for layer in by_hand()[1][-1] for head in layer}
    assert len(counts) > 2 and min(counts) < len(PROMPT), "heads drop different numbers of tokens"


# --- wrong variants ---


class ShiftedByTheWindow(KVzap):
    """Wrong: the score of the token that is a window later."""

    def scores(self, held):
        return super().scores(held).roll(-self.window, 1)


class WithoutTheNorm(KVzap):
    """Wrong: reads the residual stream."""

    def predicted(self, layer, hidden):
        weight = self._maps["weight"][layer]
        return weight @ hidden.float().T


class OneLayerLate(KVzap):
    """Wrong: reads the state after the attention and its network."""

    def observe_layer_inputs(self, first, inputs):
        depth = len(inputs)
        super().observe_layer_inputs(first, {layer: inputs[min(layer + 1, depth - 1)] for layer in inputs})


class OneTokenTooMany(KVzap):
    def retain(self, held):
        self.window = KNOBS["window"] + 1
        return super().retain(held)


class ThePromptAlone(KVzap):
    def retain(self, held):
        self.decoding = False
        return super().retain(held)


class ScoresOfAllHeads(KVzap):
    """Wrong: heads agree."""

    def predicted(self, layer, hidden):
        found = super().predicted(layer, hidden)
        return found.mean(0, keepdim=True).expand_as(found)


@pytest.mark.refuses("kvzap")
@pytest.mark.parametrize("wrong", variants_of(KVzap, __name__), ids=lambda cls: cls.__name__)
def test_other_scores_and_windows_are_refused(wrong):
    with pytest.raises(AssertionError):
        check_run(wrong)


@pytest.mark.refuses("kvzap")
def test_windows_that_are_not_kvpress_s_are_refused():
    class Inclusive(KVzap):
        def retain(self, held):
            return super().retain(Held(0, 1, "keep", held.prompt, held.next + 1, held.positions, read=None))

    with pytest.raises(AssertionError):
        check_kvpress(Inclusive)


# --- what follows from the rule ---


def test_above_the_highest_score_only_the_window_stays():
    ours = course(alone(fitted(threshold=10.0)), models())
    assert ours == course(alone(make("sink_window", sinks=0, window=KNOBS["window"] + 1)), models())


def test_below_the_lowest_score_the_cache_is_full():
    text, held = course(alone(fitted(threshold=-30.0)), models())
    assert text == course(alone(make("kvzap")), models())[0]
    assert held[-1] == [[set(range(len(PROMPT) + LENGTH - 1))] * 2] * 3


def test_a_higher_threshold_never_keeps_more():
    policies = [fitted(threshold=threshold / 10, window=1) for threshold in range(-10, 11)]
    inputs = {0: torch.randn(200, pair().target.parts.width, generator=torch.Generator().manual_seed(0))}
    counts = []
    for policy in policies:
        policy.begin(pair().target.parts)
        policy.observe_layer_inputs(0, inputs)
        counts.append(int(policy.retain(Held(0, 1, "keep", 200, 200, torch.arange(200)[None], read=None)).sum()))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def test_a_marked_token_survives_wherever_it_stands():
    parts, width = pair().target.parts, pair().target.parts.width
    marked = torch.eye(width)[0]
    for place in range(0, 60, 7):
        policy = KVzap(threshold=0.0, window=4)
        policy.begin(parts)
        policy.begin_fitted({"weight": marked.expand(3, 2, -1), "bias": torch.full((3, 2), -0.5)})
        states = torch.eye(width)[torch.arange(60) % (width - 1) + 1].double()
        states[place] = marked
        policy.observe_layer_inputs(0, {0: states})
        stays = policy.retain(Held(0, 3, "keep", 60, 60, torch.arange(60)[None], read=None))
        assert [set(head.nonzero().flatten().tolist()) for head in stays] == [{place, *range(56, 60)}] * 2


def test_states_that_come_one_by_one_give_the_scores_of_all_at_once():
    parts, found = pair().target.parts, []
    states = {0: torch.randn(30, parts.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
    for size in (30, 7, 1):
        policy = fitted()
        policy.begin(parts)
        for first in range(0, 30, size):
            policy.observe_layer_inputs(first, {0: states[0][first:first + size]})
        found.append(policy._scores[0])
    assert torch.allclose(found[0], found[1], atol=1e-5) and torch.allclose(found[0], found[2], atol=1e-5)


def test_tokens_whose_states_are_not_known_stay():
    policy = fitted(threshold=10.0, window=1)
    policy.begin(pair().target.parts)
    policy.observe_layer_inputs(3, {0: torch.ones(2, pair().target.parts.width, dtype=torch.float64)})
    stays = policy.retain(Held(0, 1, "keep", 9, 9, torch.arange(9)[None], read=None))
    assert stays.tolist() == [[True, True, True, False, False, True, True, True, True]] * 2


@pytest.mark.parametrize("drafter", ["draft_model", "token_recycling", "prompt_lookup"])
def test_drafts_within_the_window_do_not_change_the_text(drafter):
    decoder = make("speculative", drafter=drafter, verifier="greedy_match")
    drafted = course(Assembly(decoder, cache_policy=fitted(window=8)), models())
    assert drafted[0] == course(alone(fitted(window=8)), models())[0]


def test_of_several_texts_every_head_keeps_its_scores():
    policy = fitted(window=2)
    policy._scores[0] = torch.tensor([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]])
    copies = policy.for_heads(0, torch.tensor([0, 1, 0, 1])).for_heads(0, torch.tensor([3, 0]))
    stays = copies.retain(Held(0, 3, "keep", 4, 6, torch.arange(6)[None], read=None))
    assert stays.int().tolist() == [[1, 0, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1]]


def test_states_are_dropped_once_they_are_read_unless_something_else_reads_them():
    *_, lane = watch(alone(fitted()), models(), PROMPT, Limits(0, LENGTH), Draws(0))
    states = lane.target.states
    assert states.length - states.start == 1 and states.length == lane.target.store.length


def test_the_expected_share_follows_from_the_scores_of_held_out_texts():
    policy, full = fitted(threshold=0.0, window=10), Full(100, 0, 3, 2, 8, 64)
    assert policy.expected_share(full) == pytest.approx(1 - 50 / 101 * 0.9)
    assert make("kvzap").expected_share(full) == 1.0


# --- what it is fitted to ---


def examples_by_hand(ids: list[int], repeat: list[int]) -> list[tuple[Tensor, Tensor]]:
    """By layer, inputs of the library's attention, and the logarithm of the largest product, row by row."""
    model, inputs, values = network("llama").to(torch.float64), {}, {}
    model.set_attn_implementation("eager")
    for module in [layer.self_attn for layer in model.model.layers]:
        module.register_forward_pre_hook(
            lambda module, args, given: inputs.update({module.layer_idx: given["hidden_states"][0]}), with_kwargs=True)
        module.v_proj.register_forward_hook(
            lambda module, args, out, layer=module.layer_idx: values.update({layer: out[0]}))
    text = [*ids, *repeat, *ids]
    with torch.inference_mode(), exact_softmax():
        attention = model(input_ids=torch.tensor([text]), use_cache=False, output_attentions=True).attentions
    found = []
    for layer, weights in enumerate(attention):
        heads = weights.shape[1]
        out = model.model.layers[layer].self_attn.o_proj.weight.unflatten(1, (heads, -1))
        scores = torch.zeros(heads, len(ids), dtype=torch.float64)
        for head in range(heads):
            rows = values[layer].unflatten(1, (2, -1))[:len(ids), head // 2]
            for token in range(len(ids)):
                added = (out[:, head] @ rows[token]).norm()
                scores[head, token] = max(
                    weights[0, head, row, token] * added / inputs[layer][row].norm()
                    for row in range(len(text) - len(ids), len(text))
                )
        found.append((inputs[layer][:len(ids)], scores.unflatten(0, (2, 2)).amax(1).log().T))
    return found


def check_examples(found: list[tuple[Tensor, Tensor]]) -> None:
    for ours, theirs in zip(found, examples_by_hand(PROMPT, [5, 6]), strict=True):
        for mine, other in zip(ours, theirs):
            assert torch.allclose(mine, other, atol=1e-8)


def of_the_target() -> list[tuple[Tensor, Tensor]]:
    target = pair().target
    return kvzap.examples(DifferentiableLlama(target.parts), CalibrationTexts(target, [PROMPT]), PROMPT, [5, 6])


@pytest.mark.oracle("kvzap")
@torch.inference_mode()
def test_it_is_fitted_to_the_attention_of_a_repetition():
    check_examples(of_the_target())


@pytest.mark.refuses("kvzap")
@pytest.mark.parametrize("wrong", ["mean", "sum of heads", "without values"])
@torch.inference_mode()
def test_other_scores_to_fit_are_refused(wrong, monkeypatch):
    if wrong == "mean":
        monkeypatch.setattr(Tensor, "amax", lambda self, dim: self.mean(dim))
    elif wrong == "sum of heads":
        best = Tensor.amax
        monkeypatch.setattr(Tensor, "amax", lambda self, d: self.sum(d) if self.shape[d] == 2 else best(self, d))
    else:
        monkeypatch.setattr(Tensor, "norm", lambda self, dim=-1: torch.ones_like(self.sum(dim)))
    found = of_the_target()
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_examples(found)


def test_the_map_of_linear_scores_is_found_again():
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 6, generator=chance, dtype=torch.float64)
    weight, bias = torch.randn(2, 6, generator=chance, dtype=torch.float64), torch.tensor([1.0, -3.0]).double()
    sums = RidgeSums(6, 2)
    for part in inputs.split(90):
        sums.add(part, part @ weight.T + bias)
    found = sums.solved(1e-9)
    assert sums.count == 400 and sums.explained(*found) == pytest.approx(1)
    assert torch.allclose(found[0], weight, atol=1e-8) and torch.allclose(found[1], bias, atol=1e-8)


def test_the_penalty_is_that_of_ridge_regression():
    """The gradient of squared error and penalty vanishes, and the bias is free."""
    chance = torch.Generator().manual_seed(1)
    inputs, outputs = (torch.randn(50, n, generator=chance, dtype=torch.float64) for n in (4, 1))
    sums = RidgeSums(4, 1)
    sums.add(inputs, outputs)
    weight, bias = sums.solved(3.0)
    errors = inputs @ weight.T + bias - outputs
    assert torch.allclose(errors.T @ inputs + 3.0 * weight, torch.zeros(1, 4).double(), atol=1e-9)
    assert abs(float(errors.sum())) < 1e-9
    unexplained = errors.square().sum() / (outputs - outputs.mean()).square().sum()
    assert sums.explained(weight, bias) == pytest.approx(1 - float(unexplained))


def test_the_bundled_map_explains_scores_of_questions_it_has_not_seen():
    model = playground.load().target
    weights = stored("kvzap", {"target": model})
    texts = CalibrationTexts(model, world_texts(model, 99, 1, held_out=True)[:6])
    llama, repeat = DifferentiableLlama(model.parts), texts.spell(kvzap.REPEAT)
    sums = [RidgeSums(llama.width, 2) for _ in llama.layers]
    for ids in texts.texts:
        for each, example in zip(sums, kvzap.examples(llama, texts, ids, repeat)):
            each.add(*example)
    maps = zip(weights["weight"].double(), weights["bias"].double())
    assert min(each.explained(*parts) for each, parts in zip(sums, maps)) > 0.2
