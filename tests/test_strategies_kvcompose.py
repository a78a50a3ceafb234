"""KVCompose: the tokens that kvpress keeps, scores by the library's attention, and wrong variants."""
from __future__ import annotations

import json

import pytest
import torch
from pairs import network
from torch import Tensor

from playground.contract import find, make
from playground.errors import Refusal
from strategies.kv_cache import kvcompose
from support.budget_policies import roomy
from support.eviction import PROMPT, alone, course, models
from support.kvpress_scores import COMPOSED, GROUP, HEADS, KEPT, LAYERS, OUT, attention

KVCompose = find("kvcompose")
COLLAPSES = {"kvcompose": roomy("kvcompose", capacity=2048)}
REFERENCE = json.loads(OUT.read_text(encoding="utf-8"))["kvcompose"]


def check_kvpress(cls: type) -> None:
    """The same tokens as kvpress keeps."""
    scores = torch.stack([attention(layer).unflatten(0, (HEADS, GROUP)).amax(2).mean(1) for layer in range(LAYERS)])
    for (compete, least, agree), expected in zip(COMPOSED, REFERENCE):
        kept = cls(capacity=KEPT, least=least, compete=compete, agree=agree).chosen(scores)
        assert [[head.nonzero().flatten().tolist() for head in layer] for layer in kept] == expected


@torch.inference_mode()
def scores_by_hand(size: int) -> Tensor:
    """[layers, kv_heads, prompt], from the library's attention of the prompt read again, part by part."""
    model, largest = network("llama"), torch.zeros(3, 4, len(PROMPT), dtype=torch.float64)
    model.set_attn_implementation("eager")
    for start in range(0, len(PROMPT), size):
        text = [*PROMPT, *PROMPT[start:start + size]]
        weights = model(input_ids=torch.tensor([text]), output_attentions=True, use_cache=False).attentions
        found = torch.stack([each[0, :, len(PROMPT):, :len(PROMPT)].amax(1) for each in weights])
        largest = torch.maximum(largest, found)
    return largest.unflatten(1, (2, 2)).mean(2)


def kept_by_hand(scores: Tensor, capacity: int) -> list[list[set[int]]]:
    """In plain Python: composite tokens of all layers, sorted."""
    scores = (scores + scores.mean(1, keepdim=True)).tolist()
    orders = [[sorted(range(len(head)), key=lambda p: -head[p]) for head in layer] for layer in scores]
    composite = [[sum(head[order[j]] for head, order in zip(layer, own)) / len(layer) for j in range(len(layer[0]))]
                 for layer, own in zip(scores, orders)]
    composite[0] = [max(column) for column in zip(*composite)]
    best = sorted(((score, layer) for layer, each in enumerate(composite) for score in each), reverse=True)
    best = best[:capacity * len(composite)]
    counts = [sum(each == layer for _, each in best) for layer in range(len(composite))]
    return [[set(order[:count]) for order in own] for own, count in zip(orders, counts)]


def check_run(cls: type, size: int = 2048) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcompose, "MOST", size)
        _, held = course(alone(cls(capacity=8)), models())
    assert held[0] == kept_by_hand(scores_by_hand(size), 8)


class Averages(KVCompose):
    """Wrong: rows of the probe are averaged."""

    def observe_probe_heads(self, layer, weights):
        super().observe_probe_heads(layer, weights.mean(2, keepdim=True))


class OneQueryHead(KVCompose):
    def observe_probe_heads(self, layer, weights):
        super().observe_probe_heads(layer, weights[:, :1])


class OnlyTheLastPart(KVCompose):
    def observe_probe_heads(self, layer, weights):
        self._largest.pop(layer, None)
        super().observe_probe_heads(layer, weights)


class OneListForAllHeads(KVCompose):
    """Wrong: the heads of a layer keep the same tokens."""

    def chosen(self, scores):
        return super().chosen(scores.mean(1, keepdim=True).expand_as(scores))


class FirstLayerAsAny(KVCompose):
    def counts(self, ranked):
        if self.compete == "heads":
            return super().counts(ranked)
        return super().counts(torch.cat([torch.zeros_like(ranked[:1]), ranked]))[1:]


class EqualLayers(KVCompose):
    def counts(self, ranked):
        return torch.full(ranked.shape[:2], self.capacity)


@pytest.mark.oracle("kvcompose")
def test_tokens_are_those_of_kvpress():
    check_kvpress(KVCompose)


@pytest.mark.oracle("kvcompose")
@pytest.mark.parametrize("size", [2048, 9])
def test_scores_are_those_of_the_librarys_attention(size):
    check_run(KVCompose, size)


@pytest.mark.refuses("kvcompose")
@pytest.mark.parametrize("wrong", [OneListForAllHeads, FirstLayerAsAny, EqualLayers])
def test_other_choices_are_refused(wrong):
    with pytest.raises(AssertionError):
        check_kvpress(wrong)


@pytest.mark.refuses("kvcompose")
@pytest.mark.parametrize("wrong, size", [(Averages, 2048), (OneQueryHead, 2048), (OnlyTheLastPart, 9)])
def test_other_scores_are_refused(wrong, size):
    with pytest.raises(AssertionError):
        check_run(wrong, size)


def test_all_heads_of_a_layer_hold_equally_many_and_generated_tokens_stay():
    _, held = course(alone(make("kvcompose", capacity=8)), models())
    counts = [{len(head) for head in layer} for layer in held[0]]
    assert all(len(each) == 1 for each in counts) and sum(min(each) for each in counts) == 8 * 3
    assert [len(head) for head in held[3][1]] == [len(head) + 3 for head in held[0][1]]


def test_without_room_nothing_is_evicted_and_a_contradiction_is_refused():
    policy = make("kvcompose", capacity=8)
    assert policy.probe_texts(PROMPT, 0) == [] and policy._lacks_room
    assert policy.probe_texts(PROMPT, 500) == [PROMPT] and policy.probe_texts(PROMPT[:8], 500) == []
    with pytest.raises(Refusal, match="raise capacity"):
        make("kvcompose", capacity=8, least=9)
