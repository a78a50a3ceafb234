"""Lanes with a common prompt read and cache it once, and write what each would write alone."""
from __future__ import annotations

import logging
import random
from itertools import product

import pytest
import torch
from architectures import tiny
from toys import byte_tokenizer

from playground.engine.attention import cascade_attention as prefix
from playground.engine.attention import segment_attention
from playground.engine.attention.cascade_attention import PartialAttention, attend_part, merge
from playground.engine.cache.kv_cache import KVCache
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from support.recorded_forwards import recorded
from support.shared_prefixes import plain_mean

EXACT = 1e-10
OFF = 1e-3  # above this, a difference is more than rounding
TOKENS = 96


# --- attention over a prefix and later tokens ---

def numbers(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def whole(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention over all keys at once, from its definition, in float64."""
    keys, values = (rows.double().repeat_interleave(len(query) // len(rows), 0) for rows in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * 0.3
    return (scores if bias is None else scores + bias).softmax(-1) @ values


def in_two(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, count: int, bias: torch.Tensor | None = None
) -> list[PartialAttention]:
    """Attention of rows over the first `count` keys, and over the others."""
    return [
        attend_part(query, keys[:, :count], values[:, :count], None, 0.3),
        attend_part(query, keys[:, count:], values[:, count:], bias, 0.3),
    ]


@pytest.fixture(params=["fused", "written out"])
def way(request, monkeypatch) -> str:
    if request.param == "written out":
        monkeypatch.setattr(prefix, "FUSED", None)
    return request.param


@pytest.mark.parametrize("rows, count, behind, groups", product((1, 4), (1, 300), (1, 7), (1, 3)))
def test_two_merged_partial_attentions_equal_full_attention(way, rows, count, behind, groups):
    query, keys, values = (
        numbers(2 * groups, rows, 16),
        numbers(2, count + behind, 16),
        numbers(2, count + behind, 16) + 1,
    )
    assert (merge(*in_two(query, keys, values, count)) - whole(query, keys, values)).abs().max() < EXACT


def test_in_float32_merged_attention_has_float32_precision(way):
    query, keys, values = (numbers(*shape, dtype=torch.float32) for shape in ((4, 3, 16), (2, 400, 16), (2, 400, 16)))
    assert (merge(*in_two(query, keys, values, 390)) - whole(query, keys, values)).abs().max() < 1e-6


@pytest.mark.parametrize("larger", [0, 1])
def test_large_attention_scores_do_not_overflow(way, larger):
    query, keys, values = (
        torch.full((2, 1, 16), 40.0),
        numbers(2, 8, 16, dtype=torch.float32),
        numbers(2, 8, 16, dtype=torch.float32),
    )
    keys[:, 4 * larger:4 * larger + 4] += 20
    found = merge(*in_two(query, keys, values, 4))
    assert found.isfinite().all() and (found - whole(query, keys, values)).abs().max() < 1e-5


def test_a_tree_after_the_prefix_keeps_its_mask(way):
    seen = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    bias = torch.zeros(3, 3, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    query, keys, values = numbers(4, 3, 16), numbers(2, 53, 16), numbers(2, 53, 16)
    everything = torch.cat([torch.zeros(3, 50), bias], 1)
    assert (
        merge(*in_two(query, keys, values, 50, bias.repeat(2, 1))) - whole(query, keys, values, everything)
    ).abs().max() < EXACT


def halves_of_the_normaliser(first: PartialAttention, second: PartialAttention) -> torch.Tensor:
    """Mixes a base-2 and a natural logarithm."""
    return merge(PartialAttention(first.out, first.total / 0.6931), second)


def prefix_alone(first: PartialAttention, second: PartialAttention) -> torch.Tensor:
    return first.out


WRONG = [plain_mean, halves_of_the_normaliser, prefix_alone]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrongly_weighted_partial_attention_differs(wrong):
    query, keys, values = numbers(4, 3, 16), numbers(2, 60, 16), numbers(2, 60, 16) + 1
    assert (wrong(*in_two(query, keys, values, 50)) - whole(query, keys, values)).abs().max() > OFF


# --- caches that start from another one ---

# sliding windows and soft caps among them
ARCHITECTURES = ("llama", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "qwen3_moe")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request) -> Model:
    return Model(tiny(request.param), byte_tokenizer(), request.param)


@pytest.fixture(scope="module")
def llama() -> Model:
    return Model(tiny("llama"), byte_tokenizer(), "llama")


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(TOKENS), k=count)


def chain(count: int) -> list[int]:
    return list(range(-1, count - 1))


def read(model: Model, tokens: list[int]) -> KVCache:
    store = model.new_store()
    model.forward([ForwardInput(store, tokens, chain(len(tokens)))])
    store.commit(len(tokens) - 1)
    return store


def beginning_with(model: Model, read_before: KVCache) -> KVCache:
    store = model.new_store()
    store.start_from(read_before, shared=True)
    return store


TREE = [5, 7, 5, 9], [-1, -1, 0, 1]


def together(model: Model, stores: list[KVCache]) -> list[torch.Tensor]:
    """A token, a tree and a chunk of text, each after another cache, in one forward."""
    works = [
        ForwardInput(stores[0], [3], [-1]),
        ForwardInput(stores[1], *TREE),
        ForwardInput(stores[2], words(8, 6), chain(6)),
    ]
    return model.forward(works)[0]


def apart(model: Model, stores: list[KVCache]) -> list[torch.Tensor]:
    return [
        model.forward([work])[0][0]
        for work in (
            ForwardInput(stores[0], [3], [-1]),
            ForwardInput(stores[1], *TREE),
            ForwardInput(stores[2], words(8, 6), chain(6)),
        )
    ]


def off(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def test_rows_after_a_shared_prefix_equal_those_after_a_private_one(model):
    prompt = words(1, 20)
    shared = read(model, prompt)
    expected = apart(model, [read(model, prompt) for _ in range(3)])
    assert off(together(model, [beginning_with(model, shared) for _ in range(3)]), expected) < EXACT
    assert off(apart(model, [beginning_with(model, shared) for _ in range(3)]), expected) < EXACT


@pytest.mark.parametrize("wrong", WRONG)
def test_rows_with_wrongly_weighted_parts_are_detected(llama, wrong, monkeypatch):
    shared = read(llama, words(1, 20))
    expected = apart(llama, [read(llama, words(1, 20)) for _ in range(3)])
    monkeypatch.setattr(segment_attention, "merge", wrong)
    assert off(together(llama, [beginning_with(llama, shared) for _ in range(3)]), expected) > OFF


def test_two_prefixes_and_a_private_cache_share_one_forward(llama):
    first, second = words(1, 20), words(2, 17)
    one, other = read(llama, first), read(llama, second)
    works = [[beginning_with(llama, one), beginning_with(llama, other), read(llama, first), beginning_with(llama, one)],
             [read(llama, text) for text in (first, second, first, first)]]
    found, expected = (
        [*llama.forward([ForwardInput(store, [place], [-1]) for place, store in enumerate(stores)])[0]]
        for stores in works
    )
    assert off(found, expected) < EXACT


def test_rows_of_all_caches_attend_to_the_prefix_in_one_forward(llama, monkeypatch):
    """In every layer the prefix is read once for all lanes; nothing concatenates it with what follows."""
    shared, seen = read(llama, words(1, 20)), []
    stores = [beginning_with(llama, shared) for _ in range(3)]
    monkeypatch.setattr(
        segment_attention,
        "attend_part",
        lambda query, keys, *others: seen.append((query.shape[1], keys.shape[1])) or attend_part(query, keys, *others),
    )
    together(llama, stores)
    assert seen == [(11, 20), (1, 1), (4, 4), (6, 6)] * llama.depth


def test_a_prefix_is_one_object_and_is_never_written_to(llama):
    shared = read(llama, words(1, 20))
    before = [pool.read(20).clone() for pool in (*shared.keys, *shared.values)]
    stores = [beginning_with(llama, shared) for _ in range(3)]
    together(llama, stores)
    for store in stores:
        store.commit(0)
    assert {store.keys[0].prefix.data_ptr() for store in stores} == {shared.keys[0].rows.data_ptr()}
    assert all(torch.equal(pool.read(20), held) for pool, held in zip((*shared.keys, *shared.values), before))
    assert [store.common for store in stores] == [20] * 3 and stores[0].runs() == [[[(0, 21)]]]
    assert [store.bytes() - store.common_bytes() for store in stores] == [
        shared.bytes() // 20 * (1 + len(store.parents)) for store in stores
    ]


@pytest.mark.parametrize("back", [1, 3, 5, 22])
def test_a_text_may_roll_back_into_the_prompt_and_continue(llama, back):
    prompt = words(1, 20)
    shared = read(llama, prompt)
    going, staying, alone = beginning_with(llama, shared), beginning_with(llama, shared), read(llama, prompt)
    for store in (going, staying, alone):
        llama.forward([ForwardInput(store, [4, 9], chain(2))])
        store.commit(1)
    for store in (going, alone):
        store.roll_back(back)
    assert going.common == min(20, 22 - back) and going.length == 22 - back
    found, expected = (
        llama.forward([ForwardInput(store, [5, 6], chain(2)) for store in stores])[0]
        for stores in ([going, staying], [alone, alone_like(llama)])
    )
    assert off(found, expected) < EXACT
    assert staying.common == 20


def alone_like(model: Model) -> KVCache:
    store = read(model, words(1, 20))
    model.forward([ForwardInput(store, [4, 9], chain(2))])
    store.commit(1)
    return store


def test_a_cache_that_evicts_within_the_prefix_gets_a_private_copy(llama):
    shared = read(llama, words(1, 20))
    losing, staying, alone = beginning_with(llama, shared), beginning_with(llama, shared), read(llama, words(1, 20))
    live = torch.arange(20)[None] != 7
    losing.evict([live]), alone.evict([live])
    assert (losing.common, losing.common_bytes(), losing.bytes()) == (0, 0, alone.bytes()) and staying.common == 20
    assert (
        off(llama.forward([ForwardInput(losing, [3], [-1])])[0], llama.forward([ForwardInput(alone, [3], [-1])])[0])
        < EXACT
    )


def test_a_copy_is_independent(llama):
    shared, store = read(llama, words(1, 20)), llama.new_store()
    store.start_from(shared, shared=False)
    assert store.common == 0 and store.keys[0].rows.data_ptr() != shared.keys[0].rows.data_ptr()
    assert (
        off(
            llama.forward([ForwardInput(store, [3], [-1])])[0],
            llama.forward([ForwardInput(read(llama, words(1, 20)), [3], [-1])])[0],
        )
        < EXACT
    )


def test_buffers_for_cuda_graphs_include_the_prefix():
    replaying, plain = recorded("llama"), Model(tiny("llama"), byte_tokenizer(), "llama")
    plain_stores, stores = ([beginning_with(model, shared) for _ in range(2)] for model, shared in
                            ((plain, read(plain, words(1, 20))), (replaying, read(replaying, words(1, 20)))))
    for token in (3, 4):
        found, expected = (
            model.forward([ForwardInput(store, [token], [-1])])[0]
            for model, store in ((replaying, stores[0]), (plain, plain_stores[0]))
        )
        assert off(found, expected) < 1e-8
    assert (stores[0].common, stores[1].common) == (0, 20)


# --- lanes of a session ---

@pytest.fixture(autouse=True)
def quiet(caplog):
    """Silences the log of lanes that fail on purpose."""
    caplog.set_level(logging.CRITICAL, logger="playground.decoding.lane_runner")
