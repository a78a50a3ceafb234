"""The fused forward gives the library's rows, holds no weight twice, and is used only for networks that it fits."""
from __future__ import annotations

import ctypes

import pytest
import torch
from architectures import tiny
from torch import nn
from toys import byte_tokenizer

from playground.engine.cache.kv_cache import KVCache
from playground.engine.forward_input import ForwardInput
from playground.engine.graphs.fused_llama import (
    DTYPES,
    MODEL_TYPES,
    REORDER_UP_TO,
    FusedLlama,
    build_fused_llama,
)
from playground.engine.graphs.fused_parts import ONEDNN_FROM, FusedLinear
from playground.engine.hooks import Call, LayerPlan
from playground.engine.model import Model

TEXT = [5, 9, 2, 7, 7, 1, 40, 3]
PLANS = {
    "all layers": LayerPlan(),
    "one is skipped": LayerPlan(skip=frozenset([1])),
    "left after two": LayerPlan(stop=2, capture=frozenset([1, 2])),
    "entered late": LayerPlan(resume=(1, torch.linspace(-1, 1, 8 * 32, dtype=torch.float64).view(8, 32))),
}


def rows(model: Model, plan: LayerPlan) -> tuple[torch.Tensor, dict]:
    (found,), captured = model.forward([ForwardInput(model.new_store(), TEXT, list(range(-1, len(TEXT) - 1)))], plan)
    return found, captured


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_both_implementations_give_the_same_rows_for_every_plan(kind, plan):
    lean, library = (Model(tiny(kind), byte_tokenizer(), kind) for _ in range(2))
    assert lean.fused is not None
    library.fused = None
    (ours, kept), (theirs, expected) = rows(lean, plan), rows(library, plan)
    assert (ours - theirs).abs().max() < 1e-9
    assert kept.keys() == expected.keys() and all((kept[layer] - expected[layer]).abs().max() < 1e-9 for layer in kept)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_in_half_precision_it_rounds_no_worse_than_the_library(kind):
    ids, exact = torch.tensor([TEXT]), tiny(kind)
    expected = exact(input_ids=ids, use_cache=False).logits[0]
    library = tiny(kind, dtype=torch.bfloat16)
    theirs = library(input_ids=ids, use_cache=False).logits[0].double()
    segment = KVCache(exact.config.num_hidden_layers).extend(list(range(-1, len(TEXT) - 1)))
    with torch.inference_mode():
        ours = FusedLlama(library, 64)(torch.arange(len(TEXT))[None], 0, Call([segment]), ids).double()
    assert (ours - expected).abs().mean() < 1.25 * (theirs - expected).abs().mean()


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_no_weight_is_held_twice(kind):
    network = tiny(kind)
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    held = sum(weight.untyped_storage().nbytes() for weight in network.parameters())
    build_fused_llama(network, 64)
    storages = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in network.parameters()
    }
    assert sum(storages.values()) <= held
    assert all(torch.equal(weight, before[name]) for name, weight in network.named_parameters())


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "gpt_neox", "phi3", "smollm3", "granite", "mixtral"])
def test_other_model_types_use_the_librarys_forward(kind):
    assert build_fused_llama(tiny(kind), 64) is None


def test_a_network_with_an_unusual_module_uses_the_librarys_forward():
    class Packed(nn.Linear):
        """A stand-in for a quantised layer."""

    packed, curved = tiny("llama"), tiny("llama")
    packed.model.layers[1].mlp.up_proj = Packed(32, 48, bias=False)
    curved.model.layers[0].mlp.act_fn = nn.GELU()
    assert [build_fused_llama(network, 64) for network in (packed, curved)] == [None] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_cpu_it_is_used_for_every_dtype(dtype):
    """Half precision too: without it a lane in bfloat16 was slower than the library."""
    assert Model(tiny("llama", dtype=dtype), byte_tokenizer(), "llama").fused is not None


@pytest.mark.parametrize("dtype, off", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["as they are", "packed"])
@pytest.mark.parametrize("bias", [False, True], ids=["without a bias", "with a bias"])
@pytest.mark.parametrize("count", [1, 2, 16, 100])
def test_a_large_matrix_product_equals_the_layers_up_to_rounding(count, bias, packed, dtype, off):
    layer = nn.Linear(ONEDNN_FROM // 256, 256, bias=bias, dtype=dtype)
    states = torch.randn(count, ONEDNN_FROM // 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    product = FusedLinear.of(layer)
    if packed:
        product.reorder()
    with torch.inference_mode():
        found, exact = product(states), layer.double()(states.double())
    assert found.shape == (count, 256) and found.dtype == dtype
    assert (found - exact).abs().max() < off


def test_in_float64_a_block_keeps_all_its_digits():
    layer = nn.Linear(ONEDNN_FROM // 256, 256, dtype=torch.float64)
    product, states = (
        FusedLinear.of(layer),
        torch.randn(16, ONEDNN_FROM // 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    product.reorder()
    with torch.inference_mode():
        assert (product(states) - layer(states)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most, small", [(REORDER_UP_TO, True), (0, False)], ids=["small", "large"])
def test_only_a_small_networks_weights_are_held_twice(monkeypatch, most, small, dtype):
    monkeypatch.setattr("playground.engine.graphs.fused_llama.REORDER_UP_TO", most)
    monkeypatch.setattr("playground.engine.graphs.fused_parts.ONEDNN_FROM", 1)
    products = [product for layer in FusedLlama(tiny("llama", dtype=dtype), 64).layers for product in layer.linears]
    # not every processor supports bfloat16
    twice = small and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert products and all(product._reordered.is_mkldnn is twice for product in products)


class Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`: bytes in use are `uordblks`."""

    _fields_ = [(f"before_{i}", ctypes.c_size_t) for i in range(7)] + [
        (name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")
    ]


def allocated() -> int:
    """Bytes of this process that are in use on the heap, native code included."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = Allocated
    return libc.mallinfo2().uordblks


@pytest.mark.slow
def test_code_for_each_number_of_rows_does_not_pile_up():
    """oneDNN makes code for every number of rows that a prompt brings, and keeps it up to a limit of its own."""
    product = FusedLinear.of(nn.Linear(256, 256, bias=False))
    product.reorder()
    with torch.inference_mode():
        before = allocated()
        for count in range(1000, 1400):
            product(torch.zeros(count, 256))
    assert allocated() - before < 100 * 2**20  # 128 of them take 70 MB, all 400 take 220 MB
