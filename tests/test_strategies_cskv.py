"""CSKV: old states are rebuilt from codes of their channels before the rotary embedding."""
from __future__ import annotations

import numpy
import pytest
import torch
from pairs import network, pair
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from playground.contract import Full, find, make
from playground.errors import Refusal
from playground.training.calibration import CalibrationTexts
from strategies.kv_cache import cskv
from support.budget_policies import roomy
from support.coded_caches import course, text
from support.eviction import alone, models
from support.eviction import course as live_course
from support.packed_caches import LENGTH, PROMPT
from support.wrong_variants import variants_of

CSKV = find("cskv")
COLLAPSES = {"cskv": [*roomy("cskv", window=128), *roomy("cskv", window=4, key_share=1.0, value_share=1.0)]}
SHARES = {"key_share": 0.5, "value_share": 0.25}


@torch.inference_mode()
def exact_states(tokens: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the first layer, by the library: input of the projections, cosines and sines, and exact keys and values."""
    net = network("llama")
    layer, ids = net.model.layers[0], torch.tensor([tokens])
    hidden = layer.input_layernorm(net.model.embed_tokens(ids))
    cos, sin = net.model.rotary_emb(hidden, torch.arange(len(tokens))[None])
    return hidden[0], cos, sin, layer


def rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    states = keys.view(1, len(keys), 2, -1).transpose(1, 2)
    return apply_rotary_pos_emb(states, states, cos.to(keys), sin.to(keys))[0][0]


def by_hand(tokens: list[int], window: int, shares: dict[str, float]) -> list[Tensor]:
    """Keys and values of the first layer: the paper's factors of the projections, A = U S^(1/2) and B = S^(1/2) V^T."""
    hidden, cos, sin, layer = exact_states(tokens)
    closed, read = len(tokens) // window * window, []
    for name, share in (("k_proj", shares["key_share"]), ("v_proj", shares["value_share"])):
        weight = getattr(layer.self_attn, name).weight.detach().T
        size = int(share * 8) * 2
        u, s, v = numpy.linalg.svd(weight.numpy())
        a, b = u[:, :size] * s[:size] ** 0.5, s[:size, None] ** 0.5 * v[:size]
        rebuilt = hidden @ torch.tensor(a) @ torch.tensor(b)
        rows = torch.cat([rebuilt[:closed], (hidden @ weight)[closed:]])
        read.append(rotated(rows, cos, sin) if name == "k_proj" else rows.view(len(rows), 2, -1).transpose(0, 1))
    return read


def check_cskv(policy: type) -> None:
    """After every commit, and again after later windows have been closed."""
    tokens = text(policy(window=4, **SHARES))
    for held in course(policy(window=4, **SHARES)):
        for found, expected in zip(held.rows, by_hand(tokens[:held.length], 4, SHARES)):
            assert (found - expected).abs().max() < 1e-4, held.length


class CodesRotatedKeys(CSKV):
    def _unrotated(self, part, rows, first):
        return rows

    def _rotated(self, part, states, d):
        return super()._rotated("values", states, d)


class SlidingWindow(CSKV):
    def quantise_count(self, part, exact):
        return max(0, exact - self.window)


class LowRankInEachHead(CSKV):
    def factors(self, layer, part, size):
        down, up = super().factors(layer, part, 16)
        weight = self._parts.attention_projections(layer)
        weight = (weight.key if part == "keys" else weight.value).T
        down, up = torch.zeros(16, size, dtype=weight.dtype), torch.zeros(size, 16, dtype=weight.dtype)
        for head in range(2):
            rows, columns = slice(8 * head, 8 * head + 8), slice(size // 2 * head, size // 2 * (head + 1))
            own = cskv.svd_factors(weight[:, rows])
            down[rows, columns], up[columns, rows] = own[0][:, :size // 2], own[1][:size // 2]
        return down, up


class RotatesFromZero(CSKV):
    """Every window is coded as if it were the first."""

    def _unrotated(self, part, rows, first):
        return super()._unrotated(part, rows, 0)


@pytest.mark.slow
@pytest.mark.oracle("cskv")
def test_closed_windows_are_rebuilt_from_the_papers_factors_and_the_open_one_is_exact():
    check_cskv(CSKV)


@pytest.mark.refuses("cskv")
@pytest.mark.parametrize("wrong", variants_of(CSKV, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_code_is_refused(wrong):
    with pytest.raises(AssertionError):
        check_cskv(wrong)


def test_the_prefill_is_exact_and_the_text_deviates_only_after_a_window_is_closed():
    ours, plain = text(make("cskv", window=4, key_share=0.25, value_share=0.25)), text(None)
    assert ours[len(PROMPT)] == plain[len(PROMPT)] and ours != plain
    assert text(make("cskv", window=64, key_share=0.05)) == plain


def test_the_number_of_exact_tokens_is_the_length_modulo_the_window():
    for held in course(make("cskv", window=8)):
        assert held.length - held.keys.count == held.length % 8


@pytest.mark.parametrize("bits", ["16", "8", "4", "2"])
def test_bytes_are_those_of_the_codes(bits):
    policy = make("cskv", window=8, bits=bits, **SHARES)
    held, full = course(policy)[0], Full(24, 0, 3, 2, 8, 64)
    for part, packed in (("keys", held.keys), ("values", held.values)):
        assert packed.bytes * 8 == pytest.approx(policy.quantised_bits(part, full) * packed.count * 16)


def test_fewer_bits_rebuild_with_a_larger_error():
    errors = []
    for bits in ("16", "8", "4", "2"):
        held = course(make("cskv", window=8, bits=bits, **SHARES))[0]
        errors.append([float((found - exact).norm()) for found, exact in zip(held.rows, by_hand(PROMPT, 8, SHARES))])
    assert errors[0] < errors[1] < errors[2] < errors[3]


def test_plain_factors_have_the_smallest_error_and_aware_ones_where_activations_count():
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 8, generator=chance, dtype=torch.float64)
    scale = torch.rand(24, generator=chance, dtype=torch.float64) * 4 + 0.1
    plain, aware = (cskv.svd_factors(weight, each) for each in (None, scale))
    for size in (1, 3, 6):
        errors = [weight - weight @ down[:, :size] @ up[:size] for down, up in (plain, aware)]
        assert float(errors[0].norm()) == pytest.approx(float(torch.linalg.svdvals(weight)[size:].norm()))
        assert errors[0].norm() < errors[1].norm()
        assert (errors[1] * scale[:, None]).norm() < (errors[0] * scale[:, None]).norm()


def test_training_lowers_the_error_of_every_number_of_dimensions(monkeypatch):
    monkeypatch.setattr(cskv, "DESCENT", cskv.Descent("error of codes", 150, 1e-2, 25))
    texts = CalibrationTexts(pair("llama").target, [list(range(40 * n, 40 * n + 40)) for n in range(4)])
    events, losses = CSKV.calibrate(texts, 0), []
    while True:
        try:
            losses.append(next(events).data["series"]["loss"])
        except StopIteration as end:
            weights = end.value
            break
    assert losses[-1] < losses[0]
    assert weights["keys.down"].shape == (3, 16, 16) and weights["keys.down"].dtype == torch.float16
    policy = make("cskv", window=4, **SHARES)
    policy.begin_fitted(weights)
    assert len(live_course(alone(policy), models())[0]) == 10


def test_the_expected_share_is_that_of_the_codes_and_the_open_window():
    policy, full = make("cskv", window=32, key_share=0.25, value_share=0.25), Full(300, 0, 8, 2, 64, 32)
    assert policy.expected_share(full) == pytest.approx((288 * 0.25 + 12) / 300)


def test_a_model_that_normalises_its_keys_is_refused():
    with pytest.raises(Refusal, match="normalises"):
        live_course(alone(make("cskv")), models("qwen3"))


def test_the_run_has_its_length():
    assert len(text(make("cskv", window=4))) == len(PROMPT) + LENGTH
