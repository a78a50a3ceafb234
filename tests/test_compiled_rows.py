"""The layers that numba compiles give the library's rows, see what a row may see, and run only where they fit."""
from __future__ import annotations

from functools import partial

import numpy
import pytest
import torch
from architectures import tiny
from toys import byte_tokenizer

import playground
from playground.contract.lane_config import LaneConfig
from playground.engine.attention.segment_attention import Segment
from playground.engine.forward_input import ForwardInput
from playground.engine.graphs import compiled_rows
from playground.engine.graphs.compiled_rows import MOST_ROWS, CompiledRows, OwnRows, build_compiled_rows
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from support.speculation import speculative_lane

pytest.importorskip("numba")
TEXT = [5, 9, 2, 7, 7, 1, 40, 3]
EXACT = 1e-4  # of the largest logit
RECORD = 'Write as JSON: "Zabeast, who is large, sells bread and fish."'


@pytest.fixture
def model() -> Model:
    """A tiny network in float32 whose weights are numbers of bfloat16."""
    return Model(tiny("llama", dtype=torch.bfloat16).float(), byte_tokenizer(), "llama")


@pytest.fixture
def compiled(monkeypatch) -> list[int]:
    """The numbers of rows of the forwards that were compiled."""
    counts, run = [], CompiledRows.__call__

    def counted(self, ids, *rest):
        counts.append(len(ids))
        return run(self, ids, *rest)

    monkeypatch.setattr(CompiledRows, "__call__", counted)
    return counts


@torch.inference_mode()
def expected(text: list[int]) -> torch.Tensor:
    """The library's logits after the last token."""
    return tiny("llama", dtype=torch.bfloat16).float()(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


def feed(model: Model, store, tokens: list[int], parents: list[int], plan: LayerPlan | None = None) -> torch.Tensor:
    (rows,), _ = model.forward([ForwardInput(store, tokens, parents)], plan)
    return rows


def read(model: Model, tokens: list[int]):
    """A cache that holds tokens, with room for more."""
    store = model.new_store()
    feed(model, store, tokens, list(range(-1, len(tokens) - 1)))
    store.commit(len(tokens) - 1)
    return store


def error(rows: torch.Tensor, texts: list[list[int]]) -> float:
    true = torch.stack([expected(text) for text in texts])
    return float((rows - true).abs().max() / true.abs().max())


def test_tokens_one_by_one_and_a_tree_have_the_librarys_logits(model, compiled):
    store = read(model, TEXT[:4])
    for count in (5, 6):
        rows = feed(model, store, TEXT[count - 1:count], [-1])
        store.commit(0)
        assert error(rows, [TEXT[:count]]) < EXACT
    siblings = feed(model, store, [8, 40], [-1, -1])
    assert error(siblings, [[*TEXT[:6], 8], [*TEXT[:6], 40]]) < EXACT
    child = feed(model, store, [3], [1])
    assert error(child, [[*TEXT[:6], 40, 3]]) < EXACT
    assert compiled == [1, 1, 2, 1]
    store.commit(2)
    chain = feed(model, store, [1, 2, 3, 4, 5], [-1, 0, 1, 2, 3])
    assert compiled == [1, 1, 2, 1, 5] and error(chain[-1:], [[*TEXT[:6], 40, 3, 1, 2, 3, 4, 5]]) < EXACT
    store.commit(4)
    more = [token % 50 for token in range(MOST_ROWS + 1)]
    long = feed(model, store, more, list(range(-1, MOST_ROWS)))  # reads the states that the compiled layers wrote
    assert compiled == [1, 1, 2, 1, 5] and error(long[-1:], [[*TEXT[:6], 40, 3, 1, 2, 3, 4, 5, *more]]) < EXACT


def test_layers_are_asked_for_their_memory_again_only_when_one_of_them_has_moved(model, compiled, monkeypatch):
    asked, plain = [], compiled_rows._is_plain_memory
    store, buffers = read(model, TEXT[:4]), 2 * model.depth
    monkeypatch.setattr(compiled_rows, "_is_plain_memory", lambda buffer: asked.append(buffer) or plain(buffer))
    for count, times in ((5, 1), (6, 1), (7, 2), (8, 2)):
        if count == 7:
            store.values[1].rows = store.values[1].rows.clone()
        assert error(feed(model, store, TEXT[count - 1:count], [-1]), [TEXT[:count]]) < EXACT
        store.commit(0)
        assert len(asked) == times * buffers and len(compiled) == count - 4
    store.keys[0].rows = store.keys[0].rows[:, :8]  # no room for another token
    assert error(feed(model, store, [9], [-1]), [[*TEXT, 9]]) < EXACT and len(compiled) == 4


@pytest.fixture
def lanes(model) -> list:
    """The caches of three lanes: two that go on differently from one prompt, which they share, and one of its own."""
    prompt = read(model, TEXT)
    both = [model.new_store() for _ in range(2)]
    for store, token in zip(both, (8, 40)):
        store.start_from(prompt, shared=True)
        feed(model, store, [token], [-1])
        store.commit(0)
    return [*both, read(model, TEXT[:3])]


ROWS = ([3], [9, 11], [2])  # of each lane: a token, two siblings, a token
TEXTS = [[*TEXT, 8, 3], [*TEXT, 40, 9], [*TEXT, 40, 11], [*TEXT[:3], 2]]


def feed_lanes(model: Model, stores: list) -> torch.Tensor:
    rows, _ = model.forward([ForwardInput(store, tokens, [-1] * len(tokens)) for store, tokens in zip(stores, ROWS)])
    return torch.cat(rows)


def test_lanes_of_one_forward_have_the_librarys_logits_each_over_its_own_cache(model, lanes, compiled):
    assert error(feed_lanes(model, lanes), TEXTS) < EXACT and compiled == [4]
    lanes[1].commit(1)
    assert error(feed(model, lanes[1], [5], [-1]), [[*TEXT, 40, 11, 5]]) < EXACT  # the states went into its own cache


def test_a_lane_that_reads_another_prompt_than_its_own_is_noticed(model, lanes, monkeypatch):
    states, other = OwnRows.states, read(model, [1, *TEXT[1:]])
    monkeypatch.setattr(OwnRows, "states", lambda own, layer: (
        other.keys[layer].rows.numpy(), other.values[layer].rows.numpy(), *states(own, layer)[2:]
    ))
    wrong = feed_lanes(model, lanes)
    assert error(wrong[:3], TEXTS[:3]) > 10 * EXACT and error(wrong[3:], TEXTS[3:]) < EXACT


def test_a_prompt_that_other_memory_holds_is_not_read_by_compiled_layers(model, lanes, compiled):
    buffer = lanes[0].prefix_owner.keys[1]
    buffer.rows = buffer.rows.clone()
    compiled.clear()
    assert error(feed_lanes(model, lanes), TEXTS) < EXACT and not compiled


@pytest.mark.parametrize("rows", range(1, 10))
def test_projections_of_any_number_of_rows_are_the_products(rows):
    from playground.engine.graphs.row_kernels import project
    generator = torch.Generator().manual_seed(rows)
    weights, inputs = (torch.randn(*shape, generator=generator) for shape in ((7, 37), (rows, 37)))
    out = numpy.full((rows, 7), numpy.nan, numpy.float32)
    project(compiled_rows.halves(weights.bfloat16().float()), inputs.numpy(), out)
    true = inputs.double() @ weights.bfloat16().double().T
    assert (torch.from_numpy(out) - true).abs().max() < 1e-5


def test_weights_that_no_sum_can_show_are_zero_and_all_others_are_kept_to_the_bit():
    """Subnormal products take a processor many times as long: a seventh of the bundled target's channels made them."""
    weights = torch.tensor([[0.5, -0.25, 1e-3], [1e-9, -1e-12, 1e-20]]).bfloat16().float()
    found = torch.from_numpy(compiled_rows.halves(weights)).view(torch.bfloat16).float()
    assert found.tolist() == [*weights[:1].tolist(), [weights[1, 0].item(), 0, 0]]


def test_no_channel_of_the_bundled_target_makes_subnormal_products():
    compiled = playground.load(device="cpu", dtype="float32").target.compiled
    for layer in compiled._layers:
        for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
            sizes = torch.from_numpy(matrix).view(torch.bfloat16).float().abs()
            assert sizes[sizes > 0].min() > 1e-11


def test_a_row_that_sees_its_siblings_is_noticed(model, monkeypatch):
    store = read(model, TEXT[:6])
    monkeypatch.setattr(Segment, "ancestors", lambda self: numpy.ones((self.rows, self.end), numpy.uint8))
    siblings = feed(model, store, [8, 40], [-1, -1])
    assert error(siblings, [[*TEXT[:6], 8], [*TEXT[:6], 40]]) > 100 * EXACT


def just_begun(model: Model):
    store = model.new_store()
    store.start_from(read(model, TEXT), shared=True)
    return store


def watched(model: Model):
    store = read(model, TEXT)
    store.on_queries = lambda *given: None
    return store


@pytest.mark.parametrize(("begin", "rows", "plan"), [
    (lambda model: model.new_store(), 1, None),  # no memory yet
    (lambda model: read(model, TEXT), MOST_ROWS + 1, None),
    (lambda model: read(model, TEXT), 1, LayerPlan(capture=frozenset([1]))),
    (lambda model: read(model, TEXT), 1, LayerPlan(skip=frozenset([1]))),
    (just_begun, 1, None),
    (watched, 1, None),
], ids=["first", "rows", "captured", "skipped", "no memory after a shared prompt", "queries are read"])
def test_other_forwards_run_as_before(model, compiled, begin, rows, plan):
    store = begin(model)
    compiled.clear()
    feed(model, store, (3 * TEXT)[:rows], list(range(-1, rows - 1)), plan)
    assert not compiled


def test_a_cache_without_room_grows_first(model, compiled):
    store = read(model, TEXT)
    capacity = store.keys[0].rows.shape[1]
    for token in range(capacity):
        feed(model, store, [token % 50 + 1], [-1])
        store.commit(0)
    assert capacity - len(TEXT) <= len(compiled) < capacity


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_networks_with_biases_or_head_norms_are_not_compiled(kind):
    assert Model(tiny(kind, dtype=torch.bfloat16).float(), byte_tokenizer(), kind).compiled is None


def test_other_weights_and_machines_are_not_compiled(model, monkeypatch, caplog):
    assert Model(tiny("llama", dtype=torch.float32), byte_tokenizer(), "llama").compiled is None
    assert build_compiled_rows(model.fused) is not None
    monkeypatch.setattr(CompiledRows, "__init__", lambda self, network: (_ for _ in ()).throw(RuntimeError("no cache")))
    assert build_compiled_rows(model.fused) is None and "not compiled: no cache" in caplog.text
    monkeypatch.setattr(compiled_rows, "find_spec", lambda name: None)
    assert build_compiled_rows(model.fused) is None


def test_the_exponential_is_exact_to_float32():
    from playground.engine.graphs.row_kernels import exponential
    x = numpy.linspace(-86, 87, 4001, dtype=numpy.float32)
    true = numpy.exp(x.astype(numpy.float64))
    found = numpy.array([exponential(value) for value in x])
    assert numpy.abs(found / true - 1).max() < 3e-7 and exponential(numpy.float32(-200)) < 1e-37


def test_the_bundled_pair_writes_the_same_text(compiled):
    models = playground.load(device="cpu", dtype="float32")
    lanes = [LaneConfig("greedy"), speculative_lane("draft_model", "greedy_match")]
    write = partial(playground.run, models=models, chat=True, max_new_tokens=32)
    texts = [playground.compare([lane], RECORD, models=models, chat=True, max_new_tokens=32)[0].text for lane in lanes]
    assert len(compiled) > 15 and max(compiled) > 1
    models.target.compiled = models.draft.compiled = None
    assert texts == [write("greedy", RECORD).text] * 2
