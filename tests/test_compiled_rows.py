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
from playground.engine.graphs.compiled_rows import CompiledRows, build_compiled_rows
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
    long = feed(model, store, [1, 2, 3, 4, 5], [-1, 0, 1, 2, 3])  # reads the states that the compiled layers wrote
    assert compiled == [1, 1, 2, 1] and error(long[-1:], [[*TEXT[:6], 40, 3, 1, 2, 3, 4, 5]]) < EXACT


def test_a_row_that_sees_its_siblings_is_noticed(model, monkeypatch):
    store = read(model, TEXT[:6])
    monkeypatch.setattr(Segment, "ancestors", lambda self: numpy.ones((self.rows, self.end), numpy.uint8))
    siblings = feed(model, store, [8, 40], [-1, -1])
    assert error(siblings, [[*TEXT[:6], 8], [*TEXT[:6], 40]]) > 100 * EXACT


def shared(model: Model):
    store = model.new_store()
    store.start_from(read(model, TEXT), shared=True)
    return store


def watched(model: Model):
    store = read(model, TEXT)
    store.on_queries = lambda *given: None
    return store


@pytest.mark.parametrize(("begin", "rows", "plan"), [
    (lambda model: model.new_store(), 1, None),  # no memory yet
    (lambda model: read(model, TEXT), 3, None),
    (lambda model: read(model, TEXT), 1, LayerPlan(capture=frozenset([1]))),
    (lambda model: read(model, TEXT), 1, LayerPlan(skip=frozenset([1]))),
    (shared, 1, None),
    (watched, 1, None),
], ids=["first", "rows", "captured", "skipped", "shared prefix", "queries are read"])
def test_other_forwards_run_as_before(model, compiled, begin, rows, plan):
    store = begin(model)
    compiled.clear()
    feed(model, store, TEXT[:rows], list(range(-1, rows - 1)), plan)
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
    assert len(compiled) > 15 and set(compiled) <= {1, 2, 3}
    models.target.compiled = models.draft.compiled = None
    assert texts == [write("greedy", RECORD).text] * 2
