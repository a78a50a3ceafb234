"""Named neurons against the library's own activations, a planted neuron, and the change of a logit."""
from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from pairs import TOKENIZER, network, pair

from playground.contract import find
from playground.engine.model import Model
from playground.events import Figure
from support.overlay_runs import read_by, shades

LmHeadNeurons = find("lm_head_neurons")
TOKENS = [70, 71, 72, 70, 71, 90, 70, 71, 72, 91, 70]
START = 5
FIRST = re.compile(r"layer (\d+), neuron (\d+) .*?: activation (-?[\d.]+)(?:, ([+-][\d.]+) in the logit)?")


@cache
def library_run() -> tuple[list[torch.Tensor], torch.Tensor]:
    """By layer, the input of the down projection [n, k]; and the states before the final norm [n, d]."""
    model, channels, last = network("llama"), [], []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, given: channels.append(given[0][0]))
    model.model.norm.register_forward_pre_hook(lambda module, given: last.append(given[0][0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([TOKENS]), use_cache=False)
    return channels, last[0]


def strongest(token: int, named: set[tuple[int, int]]) -> tuple[float, int, int, float]:
    """Share, layer, neuron and activation of the strongest named neuron at a generated token, in plain loops."""
    found, (channels, _) = [], library_run()
    for number, layer in enumerate(network("llama").model.layers):
        row, down = channels[number][START + token].tolist(), layer.mlp.down_proj.weight.detach()
        sizes = [abs(value) * float(down[:, index].norm()) for index, value in enumerate(row)]
        whole = sum(size ** 2 for size in sizes) ** 0.5
        found += [(size / whole, number, index, row[index]) for index, size in enumerate(sizes)
                  if (number, index) in named]
    return max(found)


def z_scores(weights: torch.Tensor) -> torch.Tensor:
    """Of every row [n, d], by the definition, token by token."""
    head = network("llama").lm_head.weight.detach()
    cosines = torch.stack([torch.cosine_similarity(weights, token[None]) for token in head], 1)
    return (cosines - cosines.mean(1, keepdim=True)) / cosines.std(1, keepdim=True)


def named(least: float) -> set[tuple[int, int]]:
    found = [z_scores(layer.mlp.up_proj.weight.detach()).amax(1) for layer in network("llama").model.layers]
    return {(number, index) for number, z in enumerate(found) for index in (z >= least).nonzero()[:, 0].tolist()}


def check(cls: type[LmHeadNeurons]) -> None:
    events = read_by(cls(z=3.0), pair().target, TOKENS, START)
    (colours,) = [event for event in events if isinstance(event, Figure) and event.data.get("shades")]
    known, last = named(3.0), library_run()[1]
    model = network("llama")
    for token, (_, _, label, value) in enumerate(colours.data["spans"]):
        if value == 0:  # none of the named is among the eight of each layer that wrote most
            continue
        share, layer, neuron, activation = strongest(token, known)
        shown = FIRST.match(label)
        assert (int(shown[1]), int(shown[2])) == (layer, neuron) and value == pytest.approx(share, abs=1e-4)
        assert float(shown[3]) == pytest.approx(activation, abs=6e-3)
        if token + 1 < len(TOKENS) - START:
            state, following = last[START + token], TOKENS[START + token + 1]
            column = model.model.layers[layer].mlp.down_proj.weight.detach()[:, neuron]
            without = state - activation * column
            scale = (state.square().mean() + model.config.rms_norm_eps).rsqrt()
            target = model.lm_head.weight.detach()[following] * model.model.norm.weight.detach()
            logits = [float(rows @ target * scale) for rows in (state, without)]
            assert float(shown[4]) == pytest.approx(logits[0] - logits[1], abs=6e-3)
    assert sum(value > 0 for value in shades(events)) > 2


class OfTheTokenBefore(LmHeadNeurons):
    """Wrong: painted on the token that the row predicts."""

    def begin(self, text, model):
        super().begin(text._replace(start=text.start - 1, tokens=text.tokens[:-1]), model)


class WithoutOutputWeights(LmHeadNeurons):
    """Wrong: the largest activation, however little the neuron writes with it."""

    def read_channels(self, layer, first, channels):
        super().read_channels(layer, first, channels / self._parts.output_norms(layer))


@pytest.mark.oracle("lm_head_neurons")
def test_the_strongest_named_neuron_and_its_part_of_the_logit_are_the_librarys():
    check(LmHeadNeurons)


@pytest.mark.refuses("lm_head_neurons")
@pytest.mark.parametrize("wrong", [OfTheTokenBefore, WithoutOutputWeights])
def test_another_row_or_activations_alone_fail(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def planted(scale: float, view: str) -> Model:
    """A model whose neuron 7 of layer 1 reads, or writes, token 99 and nothing else."""
    weights = network("llama")
    with torch.no_grad():
        mlp, direction = weights.model.layers[1].mlp, weights.lm_head.weight[99]
        if view == "read":
            mlp.up_proj.weight[7] = scale * direction
        else:
            mlp.down_proj.weight[:, 7] = scale * direction / weights.model.norm.weight
    return Model(weights, TOKENIZER, "planted")


@pytest.mark.strategy("lm_head_neurons")
@pytest.mark.parametrize("view", ["read", "write"])
def test_a_planted_neuron_has_its_name_at_any_size_and_its_probability_at_a_large_one(view):
    found = []
    for scale in (1e-3, 10.0):
        overlay = LmHeadNeurons(view=view)
        read_by(overlay, planted(scale, view), TOKENS, START)
        found.append(overlay.names(1, torch.tensor([7]))[7])
    assert [name.tokens[0] for name in found] == [99, 99] and found[0].z == pytest.approx(found[1].z, abs=1e-3)
    assert found[0].p < 0.01 and found[1].p > 0.99
