"""DuoAttention: heads with the smallest gates hold only the ends of the text."""
from __future__ import annotations

import pytest
import torch
from pairs import VOCABULARY, network, pair
from registry import Collapse
from tables import watch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.contract import Full, Held, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.training.calibration import CalibrationTexts
from strategies.kv_cache import duo_attention
from support.budget_policies import HandRule, roomy, with_policy
from support.eviction import LENGTH, PROMPT, alone, course, live_positions, models
from support.wrong_variants import variants_of

Duo = find("duo_attention")
COLLAPSES = {
    "duo_attention": [
        *roomy("duo_attention", share=1.0),
        Collapse(with_policy(LaneConfig("greedy"), "duo_attention", share=0.0), LaneConfig("greedy")),
    ]
}
GATES = torch.tensor([[0.9, 0.1], [0.3, 0.2], [0.8, 0.7]])
KNOBS = {"share": 0.5, "sinks": 2, "recent": 5}


def fitted(cls: type, **knobs):
    policy = cls(**{**KNOBS, **knobs})
    policy.begin_fitted({"gates": GATES})
    return policy


def rule(seen) -> list[set[int]]:
    """The three largest gates of six are those of the first head of layer 0 and of both heads of layer 2."""
    whole = {(0, 0), (2, 0), (2, 1)}
    ends = [{p for p in head if p < 2 or p >= seen.read - 5} for head in seen.live]
    return [set(head) if (seen.layer, n) in whole else end for n, (head, end) in enumerate(zip(seen.live, ends))]


class UnequalHands(HandRule):
    """The library's cache holds all; evicted tokens are hidden by a mask of each layer and head."""

    @torch.inference_mode()
    def write(self, prompt: list[int], length: int):
        model, text, kept = network("llama"), list(prompt), {}
        whole = {(0, 0), (2, 0), (2, 1)}

        def attend(module, query, key, value, mask, **others):
            rows, slots = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
            seen = []
            for head in range(key.shape[1]):
                near = (slots < 2) | (rows - slots <= 5) | (rows < len(prompt))
                seen.append((rows >= slots) & (near | ((module.layer_idx, head) in whole)))
            mask = torch.stack(seen).repeat_interleave(2, 0)[None]
            key, value = (x.repeat_interleave(2, 1) for x in (key, value))
            return scaled_dot_product_attention(query, key, value, mask).transpose(1, 2), None

        from transformers import AttentionInterface
        AttentionInterface.register("two kinds of heads", attend)
        model.set_attn_implementation("two kinds of heads")
        while len(text) < len(prompt) + length:
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        ends = lambda read: {p for p in range(read) if p < 2 or p >= read - 5}  # noqa: E731
        for number in range(length):
            read = len(prompt) + number
            kept[number] = [[set(range(read)) if (layer, head) in whole else ends(read) for head in range(2)]
                            for layer in range(3)]
        return text[len(prompt):], list(kept.values())


def check(cls: type) -> None:
    assert course(alone(fitted(cls)), models()) == UnequalHands("llama", rule).write(PROMPT, LENGTH)


class KeepsTheSmallestGates(Duo):
    def retrieval_heads(self):
        self._gates = -self._gates.abs()
        return super().retrieval_heads()


class ASharePerLayer(Duo):
    def retrieval_heads(self):
        return self._gates >= self._gates.amax(1, keepdim=True)


class WithoutSinks(Duo):
    def retain(self, held):
        self.sinks = 0
        return super().retain(held)


@pytest.mark.oracle("duo_attention")
def test_text_and_cache_equal_the_librarys_with_both_kinds_of_heads():
    check(Duo)


@pytest.mark.refuses("duo_attention")
@pytest.mark.parametrize("wrong", variants_of(Duo, __name__), ids=lambda cls: cls.__name__)
def test_wrong_heads_are_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def test_every_head_is_expected_to_take_the_memory_of_what_it_holds():
    policy, full = fitted(Duo), Full(100, 0, 3, 2, 8, 64)
    assert policy.expected_share(full) == pytest.approx((3 + 3 * 0.07) / 6)
    assert make("duo_attention").expected_share(full) == 1.0


def test_streaming_heads_take_the_memory_of_the_ends_of_the_text():
    *_, lane = watch(alone(fitted(Duo)), models(), PROMPT, Limits(0, LENGTH), Draws(0))
    store, row = lane.target.store, 2 * 8 * 8  # a key and a value of 8 numbers in float64
    held = sum(len(head) for layer in live_positions(lane) for head in layer)
    streaming = 3 * (KNOBS["sinks"] + KNOBS["recent"])
    assert held <= 3 * store.length + streaming < 6 * store.length
    assert store.bytes() == (held + 6 * len(store.parents)) * row
    assert [buffer.ragged is None for buffer in store.keys] == [False, True, True], "layer 0 has both kinds of heads"


@pytest.mark.parametrize("drafter", ["draft_model", "token_recycling"])
def test_drafts_do_not_change_the_text_of_both_kinds_of_heads(drafter):
    decoder = make("speculative", drafter=drafter, verifier="greedy_match")
    drafted = course(Assembly(decoder, cache_policy=fitted(Duo)), models())
    assert drafted[0] == course(alone(fitted(Duo)), models())[0]


def test_of_several_texts_every_head_keeps_its_kind():
    policy, heads = fitted(Duo), torch.tensor([0, 1, 0, 1])
    copies = policy.for_heads(0, heads).for_heads(0, torch.tensor([2, 3, 1]))
    positions = torch.arange(20)[None].expand(3, -1)
    stays = copies.retain(Held(0, 3, "keep", 10, 20, positions, read=None))
    assert stays.sum(1).tolist() == [20, 7, 7]


def test_gates_mix_full_and_streaming_attention(monkeypatch):
    monkeypatch.setattr(duo_attention, "SINKS", 1)
    monkeypatch.setattr(duo_attention, "RECENT", 3)
    llama = DifferentiableLlama(pair("llama").target.parts)
    chance = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(n, 6, 8, generator=chance, dtype=torch.float64) for n in (4, 2, 2))
    found = duo_attention.gated_attention(llama, torch.tensor([[0.25, 1.0]], dtype=torch.float64), 6)(
        0, query, keys, values)
    near = torch.tensor([[i >= j and (j < 1 or i - j < 3) for j in range(6)] for i in range(6)])
    for head in range(4):
        scores = query[head] @ keys[head // 2].T / 8 ** 0.5
        full, part = (masked(scores, seen) @ values[head // 2] for seen in (torch.ones(6, 6).tril().bool(), near))
        gate = (0.25, 1.0)[head // 2]
        assert torch.allclose(found[head], gate * full + (1 - gate) * part)


def masked(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


def test_training_pulls_gates_down_where_nothing_is_lost(monkeypatch):
    for name, value in (("DESCENT", duo_attention.Descent("loss", 8, 5e-2, 4)), ("SHORTEST", 8), ("RECENT", 64)):
        monkeypatch.setattr(duo_attention, name, value)
    ids = torch.randint(VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1)).tolist()
    events = Duo.calibrate(CalibrationTexts(pair("llama", dtype=torch.float32).target, ids), 0)
    while True:
        try:
            next(events)
        except StopIteration as end:
            assert (end.value["gates"] < 0.9).all()  # streaming heads see the whole text, so only the penalty acts
            break
