"""The interface of cache policies: attention of retained rows, different holes in every head, and quantised rows."""
from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel

from playground.engine.attention.attention_mask import EMPTY, Focus
from playground.engine.cache.kv_cache import KVCache
from playground.engine.forward_input import ForwardInput
from playground.engine.model import ForwardInput, Model
from support.kv_caches import chain, exact_softmax, feed, words
from support.laws import EXACT
from support.retained_slots import ROOM, Both, evict, grow, llama, mask, pair  # noqa: F401

# --- observed attention ---

@dataclass
class Heard:
    """Attention reported by a cache, by layer [kv_heads, rows, positions]; reported twice counts twice."""

    layers: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, weights: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> None:
        held = self.layers.setdefault(layer, torch.zeros(len(weights), ROOM, ROOM, dtype=weights.dtype))
        for head, positions in enumerate(keys.expand(len(weights), -1).tolist()):
            for column, position in enumerate(positions):
                if position != EMPTY:
                    held[head, queries, position] += weights[head, :, column]

    def rows(self) -> set[int]:
        """Positions of the reported rows, the same in every layer."""
        recorded = {tuple(held.sum((0, 2)).nonzero().flatten().tolist()) for held in self.layers.values()}
        assert len(recorded) == 1
        return set(recorded.pop())


def listening(model: Model) -> tuple[KVCache, Heard]:
    store, heard = model.new_store(), Heard()
    store.on_attention = heard
    return store, heard


def feed_watched(
    model: Model, store: KVCache, tokens: list[int], parents: list[int], wanted=lambda position: True
) -> torch.Tensor:
    (rows,), _ = model.forward([ForwardInput(store, tokens, parents, watch=wanted)])
    return rows


@torch.inference_mode()
def library_attention(twin: PreTrainedModel, text: list[int], kv_heads: int) -> torch.Tensor:
    """Weights of the library's own attention, summed over the query heads of a group, [layers, kv_heads, n, n]."""
    twin.set_attn_implementation("eager")
    with exact_softmax():
        layers = twin(input_ids=torch.tensor([text]), use_cache=False, output_attentions=True).attentions
    return torch.stack([weights[0] for weights in layers]).unflatten(1, (kv_heads, -1)).sum(2)


def test_observed_attention_of_a_chain_equals_the_librarys(pair):
    model, twin = pair
    store, heard = listening(model)
    text = words(1, 20)
    for start, stop in ((0, 8), (8, 17), (17, 20)):
        feed_watched(model, store, text[start:stop], chain(stop - start))
        store.commit(stop - start - 1)
    expected = library_attention(twin, text, store.heads)
    assert heard.rows() == set(range(20))
    for layer, held in heard.layers.items():
        assert (held[:, :20, :20] - expected[layer]).abs().max() < EXACT
        assert held[:, :, 20:].abs().max() == 0


@pytest.mark.parametrize("seed", range(3))
def test_only_committed_rows_of_a_tree_are_observed_once_at_true_positions(pair, seed):
    model, twin = pair
    store, heard = listening(model)
    text = words(2, 6)
    feed_watched(model, store, text, chain(6))
    store.commit(5)
    for _ in grow(random.Random(seed), text, store, lambda new, parents: feed_watched(model, store, new, parents)):
        assert heard.rows() == set(range(len(text)))
    expected, n = library_attention(twin, text, store.heads), len(text)
    for layer, held in heard.layers.items():
        assert (held[:, :n, :n] - expected[layer]).abs().max() < EXACT


def test_only_the_rows_a_policy_requests_are_observed(llama):
    model, _ = llama
    store, heard = listening(model)
    for tokens, node in ((words(3, 10), 9), (words(4, 4), 2)):
        feed_watched(model, store, tokens, chain(len(tokens)), wanted=lambda position: 7 <= position < 12)
        store.commit(node)
    assert heard.rows() == {7, 8, 9, 10, 11}


def test_a_row_that_is_rolled_back_and_fed_again_is_observed_once(llama):
    model, twin = llama
    store, heard = listening(model)
    text = words(5, 9)
    feed_watched(model, store, text, chain(9))
    store.commit(8)
    store.roll_back(1)
    feed_watched(model, store, text[8:] + [3], [-1, 0])
    store.commit(1)
    expected = library_attention(twin, text + [3], store.heads)
    assert all((held[:, :10, :10] - expected[layer]).abs().max() < EXACT for layer, held in heard.layers.items())


def test_a_pruned_tree_is_observed_at_its_new_slots(llama):
    model, twin = llama
    store, heard = listening(model)
    text = words(6, 5)
    feed_watched(model, store, text, chain(5))
    store.commit(4)
    feed_watched(model, store, [10, 20, 30, 40], [-1, -1, 1, 2])
    store.prune([1, 2, 3])
    feed_watched(model, store, [50], [2])
    store.commit(3)
    expected = library_attention(twin, text + [20, 30, 40, 50], store.heads)
    assert all((held[:, :9, :9] - expected[layer]).abs().max() < EXACT for layer, held in heard.layers.items())


# --- holes in every head ---

def test_an_evicted_slot_has_no_weight_although_its_token_was_attended_to(llama):
    model, _ = llama
    store, recorded = model.new_store(), []
    store.on_attention = lambda layer, weights, queries, keys: recorded.append(
        weights.masked_select((keys == EMPTY)[:, None])
    )
    feed_watched(model, store, words(7, 6), chain(6))
    store.commit(5)
    feed_watched(model, store, [5], [-1])  # it attends to evicted slots before its commit
    store.evict([torch.tensor([[1, 1, 1, 0, 1, 1], [1, 0, 0, 1, 1, 1]]).bool()])
    recorded.clear()
    store.commit(0)
    assert [weights.tolist() for weights in recorded] == [[0.0]] * 3


def test_selection_for_one_row_does_not_affect_others(llama):
    model, _ = llama
    plain, narrow = model.new_store(), model.new_store()
    narrow.focus = Focus(
        lambda layer, weights, queries: weights == weights.amax(-1, keepdim=True), lambda position: position == 7
    )
    for store in (plain, narrow):
        feed(model, store, words(7, 6), chain(6))
        store.commit(5)
    expected, found = (feed(model, store, [5, 6], [-1, 0]) for store in (plain, narrow))
    assert (found[0] - expected[0]).abs().max() < EXACT < (found[1] - expected[1]).abs().max()


@pytest.mark.parametrize("seed", range(3))
def test_evicting_and_masking_slots_give_equal_rows_and_attention_in_trees(pair, seed):
    model, _ = pair
    (freed, recorded), (hidden, expected) = listening(model), listening(model)
    lives = torch.rand(20, 3, 4, ROOM, generator=torch.Generator().manual_seed(seed)) < 0.8
    largest, text = 0.0, words(7, 12)

    def feed_both(new: list[int], parents: list[int]) -> None:
        nonlocal largest
        ours, theirs = (feed_watched(model, store, new, parents) for store in (freed, hidden))
        largest = max(largest, float((ours - theirs).abs().max()))

    feed_both(text, chain(12))
    both = Both(freed, hidden)
    both.commit(11)
    for live, _ in zip(lives, grow(random.Random(seed), text, both, feed_both)):
        evict(freed, live[:, :freed.heads])
        mask(hidden, live[:, :freed.heads])
    assert largest < EXACT
    assert freed.live_slots() == hidden.live_slots() < freed.depth * freed.heads * len(text) / 2
    assert all((recorded.layers[layer] - expected.layers[layer]).abs().max() < EXACT for layer in range(3))
    assert max(slots.count for slots in freed.slots) < len(text)
