"""KVzip: the tokens that the model attends to while it repeats its prompt."""
from __future__ import annotations

import pytest
import torch
from pairs import network
from torch import Tensor

from playground.contract import find, make
from strategies.kv_cache import kvzip
from support.budget_policies import best, roomy
from support.eviction import PROMPT, alone, course, models
from support.wrong_variants import variants_of

KVzip = find("kvzip")
COLLAPSES = {"kvzip": roomy("kvzip", capacity=2048)}
KNOBS = {"capacity": 8, "sinks": 2}
TOKENS = len(PROMPT)


def spelt(text: str) -> list[int]:
    return [token for token in models()["target"].tokens.encode(text)
            if not models()["target"].tokens.is_special(token)]


@torch.inference_mode()
def scores_by_hand(size: int) -> Tensor:
    """[layers, kv_heads, prompt]: the largest weight of any row and query head, part by part, from the library's
    attention over the prompt and the repetition, normalised over the part, the first two tokens and the repetition.
    """
    model, found = network("llama"), torch.zeros(3, 2, TOKENS, dtype=torch.float64)
    model.set_attn_implementation("eager")
    for start in range(0, TOKENS, size):
        end = min(TOKENS, start + size)
        asked = [*spelt(kvzip.LATER), *PROMPT[start - 8 if start >= 8 else 0:start]] if start else spelt(kvzip.FIRST)
        text = [*PROMPT, *asked, *PROMPT[start:end]]
        weights = model(input_ids=torch.tensor([text]), output_attentions=True, use_cache=False).attentions
        for layer, each in enumerate(weights):
            rows = each[0, :, TOKENS:].clone()
            counted = [p for p in range(len(text)) if p < min(2, start) or start <= p < end or p >= TOKENS]
            rows = rows / rows[:, :, counted].sum(-1, keepdim=True)
            for head in range(2):
                found[layer, head, start:end] = rows[2 * head:2 * head + 2, :, start:end].amax((0, 1))
    return found


def kept_by_hand(scores: Tensor, shared: bool) -> list[list[set[int]]]:
    numbers = {(layer, head, p): float(scores[layer, head, p])
               for layer in range(3) for head in range(2) for p in range(2, TOKENS)}
    if shared:
        chosen = sorted(numbers, key=numbers.get, reverse=True)[:6 * (8 - 2)]
        return [[{0, 1} | {p for a, b, p in chosen if (a, b) == (layer, head)} for head in range(2)]
                for layer in range(3)]
    return [[{0, 1} | best({p: numbers[layer, head, p] for p in range(2, TOKENS)}, 6) for head in range(2)]
            for layer in range(3)]


def check(cls: type, size: int = 2048, budgets: str = "shared") -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvzip, "MOST", size)
        _, held = course(alone(cls(budgets=budgets, **KNOBS)), models())
    assert held[0] == kept_by_hand(scores_by_hand(size), budgets == "shared")


class SumsAttention(KVzip):
    def observe_probe_heads(self, layer, weights):
        super().observe_probe_heads(layer, weights.sum(2, keepdim=True).expand_as(weights) / 1000)


class WithoutRepetition(KVzip):
    """Only the instruction is read."""

    def probe_texts(self, text, room):
        texts = super().probe_texts(text, room)
        self._parts = [(len(each) - (end - start), start, end) for each, (_, start, end) in zip(texts, self._parts)]
        return [each[:rows] for each, (rows, _, _) in zip(texts, self._parts)]


class OneQueryHead(KVzip):
    def observe_probe_heads(self, layer, weights):
        super().observe_probe_heads(layer, weights[:, :1])


@pytest.mark.oracle("kvzip")
@pytest.mark.parametrize("size, budgets", [(2048, "shared"), (9, "even")])
def test_slots_are_those_with_the_largest_attention_of_the_repetition(size, budgets):
    check(KVzip, size, budgets)


@pytest.mark.refuses("kvzip")
@pytest.mark.parametrize("wrong", variants_of(KVzip, __name__), ids=lambda cls: cls.__name__)
def test_wrong_scores_are_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def test_the_repetition_leaves_no_trace_in_the_text_and_generated_tokens_stay():
    tokens, held = course(alone(make("kvzip", budgets="even", **KNOBS)), models())
    assert tokens[0] == course(alone(make("kvzip", capacity=2048)), models())[0][0]
    assert all(len(head) == 8 + n for n, layers in enumerate(held) for layer in layers for head in layer)


def test_without_room_for_a_repetition_nothing_is_evicted():
    policy = make("kvzip", **KNOBS)
    policy.spell = spelt
    assert policy.probe_texts(PROMPT, 5) == [] and policy._lacks_room
    assert len(policy.probe_texts(PROMPT, 500)) == 1
