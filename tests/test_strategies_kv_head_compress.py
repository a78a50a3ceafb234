"""Compressed KV heads: a model with fewer of them computes what the original computes with projected states."""
from __future__ import annotations

import json

import numpy
import pytest
import torch
from pairs import network
from torch import Tensor

from playground.contract import find, make
from playground.errors import Refusal
from playground.events import Figure
from support.wrong_variants import variants_of

Method = find("kv_head_compress")
TEXTS = [torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(6)]
KV, D = 2, 8


def states(model, layer: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Keys before the rotary embedding and values of the texts, [tokens, heads, d]."""
    caught = {}
    attention = model.model.layers[layer].self_attn
    handles = [getattr(attention, name).register_forward_hook(
        lambda module, given, out, name=name: caught.setdefault(name, []).append(out[0]))
        for name in ("k_proj", "v_proj")]
    with torch.inference_mode():
        for ids in TEXTS:
            model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return tuple(torch.cat(caught[name]).unflatten(1, (KV, D)).numpy() for name in ("k_proj", "v_proj"))


def projectors(keys: numpy.ndarray, values: numpy.ndarray) -> tuple[Tensor, Tensor]:
    """Projections of the channels of both heads onto the best code, [2 d, 2 d], by singular value decompositions."""
    _, _, right = numpy.linalg.svd(values.reshape(len(values), -1))
    for_values = right[:D].T @ right[:D]
    for_keys = numpy.zeros((KV, D, KV, D))
    for f in range(D // 2):
        numbers = keys[:, :, f] + 1j * keys[:, :, f + D // 2]
        _, _, right = numpy.linalg.svd(numbers)
        project = right[:1].conj().T @ right[:1]  # numbers @ project is the best approximation of rank 1
        for i in range(KV):
            for j in range(KV):
                a, b = project[i, j].real, project[i, j].imag
                for_keys[i, f, j, f], for_keys[i, f, j, f + D // 2] = a, b
                for_keys[i, f + D // 2, j, f], for_keys[i, f + D // 2, j, f + D // 2] = -b, a
    return torch.tensor(for_keys.reshape(KV * D, KV * D)), torch.tensor(for_values)


def logits_by_hand(ids: list[int]) -> Tensor:
    """The original model, whose keys and values are replaced by their projections, layer by layer as it is converted.
    """
    model = network("llama")
    for layer in range(3):
        for_keys, for_values = projectors(*states(model, layer))
        attention = model.model.layers[layer].self_attn
        for projection, square in ((attention.k_proj, for_keys), (attention.v_proj, for_values)):
            projection.register_forward_hook(lambda module, given, out, square=square: out @ square)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def converted(cls: type, **knobs):
    model = network("llama")
    events = list(cls(**{"steps": 0, **knobs}).make(model, TEXTS, 0))
    return model, events


def logits(model, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]


def check(cls: type) -> None:
    assert (logits(converted(cls)[0], TEXTS[0]) - logits_by_hand(TEXTS[0])).abs().max() < 1e-8


class MeanOfTheHeads(Method):
    def _statistics(self, network, attention, texts):
        return {}


class OfTheWeights(Method):
    def _statistics(self, network, attention, texts):
        self.method = "weights"
        return super()._statistics(network, attention, texts)


class Centred(Method):
    """The mean is taken from the states, and not carried along."""

    def _statistics(self, network, attention, texts):
        squares = super()._statistics(network, attention, texts)
        return {part: square - square.mean(1, keepdim=True) @ square.mean(0, keepdim=True) / square.mean()
                for part, square in squares.items()}


class QueriesAsTheyWere(Method):
    """The maps are absorbed by the output projection only."""

    def make(self, network, texts, seed):
        before = [layer.self_attn.q_proj.weight.clone() for layer in network.model.layers]
        yield from super().make(network, texts, seed)
        for layer, weight in zip(network.model.layers, before):
            layer.self_attn.q_proj.weight.data = weight


@pytest.mark.oracle("kv_head_compress")
def test_the_new_model_computes_what_projected_keys_and_values_give():
    check(Method)


@pytest.mark.refuses("kv_head_compress")
@pytest.mark.parametrize("wrong", variants_of(Method, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_combination_is_refused(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def test_groups_of_one_head_change_nothing():
    model, _ = converted(Method, group=1)
    assert (logits(model, TEXTS[0]) - logits(network("llama"), TEXTS[0])).abs().max() < 1e-9


def test_equal_heads_are_combined_exactly_by_any_method():
    for method in ("activations", "weights", "mean"):
        original, model = network("llama"), network("llama")
        for each in (original, model):
            for layer in each.model.layers:
                for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                    projection.weight.data[D:] = projection.weight.data[:D]
        list(make("kv_head_compress", steps=0, method=method).make(model, TEXTS, 0))
        assert (logits(model, TEXTS[0]) - logits(original, TEXTS[0])).abs().max() < 1e-9


def test_the_new_model_is_an_ordinary_one_with_fewer_heads(tmp_path):
    from transformers import AutoModelForCausalLM
    model, events = converted(Method)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert json.loads((tmp_path / "config.json").read_text())["num_key_value_heads"] == 1
    assert (logits(loaded, TEXTS[0]) - logits(model, TEXTS[0])).abs().max() < 1e-9
    energy = [event.data["series"] for event in events if isinstance(event, Figure)]
    assert len(energy) == 3 and all(0.4 < share < 1 for each in energy for share in each.values())


def test_fine_tuning_brings_the_distributions_closer():
    _, events = converted(Method, steps=40, lr=1e-2, rank=4, length=16, batch=2)
    curve = [event.data["series"]["divergence"] for event in events[3:] if isinstance(event, Figure)]
    assert curve[-1] < curve[0]


def test_groups_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(Refusal, match="does not divide"):
        converted(Method, group=3)
    with pytest.raises(Refusal, match="cannot be combined"):
        list(make("kv_head_compress").make(network("gpt2"), TEXTS, 0))
