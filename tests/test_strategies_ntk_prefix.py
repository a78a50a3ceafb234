"""NTK-Attention: a summary is read beside the softmax over the tokens."""
from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from pairs import VOCABULARY, network, pair
from registry import Collapse
from torch import Tensor

from playground.contract import find, make
from playground.contract.lane_config import LaneConfig
from playground.training.calibration import CalibrationTexts
from strategies.kv_cache import ntk_prefix
from support.budget_policies import roomy, with_policy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.wrong_variants import variants_of

NTKPrefix = find("ntk_prefix")
COLLAPSES = {
    "ntk_prefix": [
        *roomy("ntk_prefix"),
        Collapse(
            with_policy(LaneConfig("greedy"), "ntk_prefix", size=8, sinks=2, scale=0.0),
            with_policy(LaneConfig("greedy"), "sink_window", sinks=2, window=7, positions="true"),
        ),
    ]
}
LAYERS, HEADS, D = 3, 4, 8


def fitted(seed: int = 0) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {"matrix": torch.randn(LAYERS, HEADS, D, D, generator=chance) * 3,
            "vector": torch.randn(LAYERS, HEADS, D, generator=chance) * 3}


def feature(x: float) -> float:
    x /= D ** 0.25
    return (x if x > 0 else math.exp(x) - 1) + 1


def attention_by_hand(query: Tensor, keys: Tensor, values: Tensor, matrix: Tensor, vector: Tensor) -> Tensor:
    """One head, row by row: [n, d] from [n, d], [m, d] and [m, d]; the last n keys are those of the rows."""
    rows = []
    for row, q in enumerate(query.tolist()):
        last = len(keys) - len(query) + row
        powers = [math.exp(sum(a * b for a, b in zip(q, key)) / D ** 0.5) for key in keys[:last + 1].tolist()]
        read = [feature(x) for x in q]
        below = sum(powers) + sum(x * abs(k) for x, k in zip(read, vector.tolist()))
        above = [
            sum(p * v[c] for p, v in zip(powers, values.tolist()))
            + sum(x * z[c] for x, z in zip(read, matrix.tolist()))
            for c in range(D)
        ]
        rows.append([x / below for x in above])
    return torch.tensor(rows, dtype=query.dtype)


def text_by_hand(weights: dict[str, Tensor]) -> list[int]:
    """Greedy decoding by the library, whose attention is replaced by the formula; reads the whole text each time."""
    from transformers import AttentionInterface

    def attend(module, query, key, value, mask, **others):
        groups, layer = HEADS // key.shape[1], module.layer_idx
        outputs = [
            attention_by_hand(query[0, head], key[0, head // groups], value[0, head // groups],
                              weights["matrix"][layer, head].double(), weights["vector"][layer, head].double())
            for head in range(HEADS)
        ]
        return torch.stack(outputs, 1)[None], None

    AttentionInterface.register("by hand", attend)
    model, ids = network("llama"), list(PROMPT)
    model.set_attn_implementation("by hand")
    with torch.inference_mode():
        for _ in range(3):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT):]


def check(cls: type) -> None:
    policy = cls()
    policy.begin_fitted(fitted())
    assert course(alone(policy), models())[0][:3] == text_by_hand(fitted())


class WeightsAsLogits(NTKPrefix):
    """The summary's weight enters the softmax as if it were a logit."""

    def attend_memory(self, layer, query_states, query_positions, seen):
        matrix, vector = self._summary(layer, query_states)
        read = ntk_prefix.features(query_states.to(matrix))
        weight = (read @ vector[..., None])[..., 0]
        return ntk_prefix.with_summary(seen, read @ matrix, weight.exp())[0]


class NegativeWeights(NTKPrefix):
    def begin_fitted(self, weights):
        super().begin_fitted({**weights, "vector": weights["vector"].clamp(min=0)})


class WithoutTheScaleOfTheSlots(NTKPrefix):
    """The summary is not divided by the power that the softmax was divided by."""

    def attend_memory(self, layer, query_states, query_positions, seen):
        return super().attend_memory(layer, query_states, query_positions, seen._replace(total=seen.total * 0))


class OneSummaryForAllHeads(NTKPrefix):
    def begin_fitted(self, weights):
        super().begin_fitted({name: tensor[:, :1].expand_as(tensor) for name, tensor in weights.items()})


@pytest.mark.oracle("ntk_prefix")
def test_a_run_writes_what_the_library_writes_with_the_formula_as_its_attention():
    check(NTKPrefix)


@pytest.mark.refuses("ntk_prefix")
@pytest.mark.parametrize("wrong", variants_of(NTKPrefix, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_formula_is_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def taylor(x: Tensor, degree: int = 12) -> Tensor:
    """Features [n, ...] of [n, 2] whose products are exp(x . y / sqrt 2), up to the degree."""
    return torch.stack([
        x[:, 0] ** i * x[:, 1] ** j / 2 ** ((i + j) / 4) / math.sqrt(math.factorial(i) * math.factorial(j))
        for i in range(degree) for j in range(degree) if i + j <= degree
    ], 1)


@pytest.mark.oracle("ntk_prefix")
def test_with_exact_features_the_summary_of_a_prefix_equals_attention_to_the_prefix():
    chance = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(n, 2, generator=chance, dtype=torch.float64) * 0.5 for n in (4, 9, 9))
    scores = query @ keys.T / 2 ** 0.5
    full = scores.softmax(-1) @ values
    own = SimpleNamespace(out=(scores[:, 5:].softmax(-1) @ values[5:])[None], total=scores[:, 5:].logsumexp(-1)[None])
    read, held = taylor(query), taylor(keys[:5])
    out, share = ntk_prefix.with_summary(own, (read @ (held.T @ values[:5]))[None], (read @ held.sum(0))[None])
    assert (out[0] - full).abs().max() < 1e-6
    assert torch.allclose(share[0], scores.softmax(-1)[:, :5].sum(-1), atol=1e-6)


def test_extreme_scores_give_numbers():
    for total in (-300.0, 300.0):
        seen = SimpleNamespace(out=torch.ones(1, 1, 2), total=torch.full((1, 1), total))
        out, share = ntk_prefix.with_summary(seen, torch.full((1, 1, 2), 3.0), torch.ones(1, 1))
        assert torch.isfinite(out).all() and 0 <= float(share) <= 1


def test_evicted_tokens_are_summed_into_a_summary_that_takes_memory():
    policy = make("ntk_prefix", size=8, sinks=2)
    tokens, held = course(alone(policy), models())
    assert all(len(head) == 8 for layers in held for layer in layers for head in layer)
    assert policy.memory_bytes == 0  # the lane has a copy
    forgotten = make("ntk_prefix", size=8, sinks=2, scale=0.0)
    assert tokens != course(alone(forgotten), models())[0]


@pytest.mark.slow
def test_training_brings_the_model_closer_to_itself_with_the_prefix(monkeypatch):
    monkeypatch.setattr(ntk_prefix, "DESCENT", ntk_prefix.Descent("divergence", 30, 3e-2, 10))
    monkeypatch.setattr(ntk_prefix, "HELD_OUT", 2)
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (7, 8), generator=chance).tolist()
    events, losses = NTKPrefix.calibrate(CalibrationTexts(pair("llama", dtype=torch.float32).target, ids), 0), []
    while True:
        try:
            losses.append(next(events).data)
        except AttributeError:  # the note at the end
            continue
        except StopIteration as end:
            weights = end.value
            break
    curve = [data["series"]["loss"] for data in losses]
    assert curve[-1] < curve[0] and weights["matrix"].shape == (LAYERS, HEADS, D, D)
    assert len(course(alone(make("ntk_prefix")), models())[0]) == LENGTH
