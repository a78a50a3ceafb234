"""Token dynamics of Mamba against the states in the library's own cache, prefix by prefix, and its mixers' outputs."""
from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from pairs import TOKENIZER, VOCABULARY, pair
from recurrent_networks import recurrent
from torch.nn.functional import silu

from playground.contract import find
from playground.decoding import overlay_reading
from playground.engine.model import Model
from playground.errors import Refusal
from support.overlay_runs import named, read_by, shades

SsmDynamics = find("ssm_dynamics")
TOKENS, START = [54, 71, 9, 200, 54, 71, 33, 80, 81], 4
ROUNDING = 1e-3  # the library scans in float32
TYPES = ("mamba", "falcon_mamba")


def network(architecture: str):
    return recurrent(architecture, vocab_size=VOCABULARY, tie_word_embeddings=False, eos_token_id=None)


@cache
def model(architecture: str) -> Model:
    return Model(network(architecture), TOKENIZER, architecture)


@cache
def library_states(architecture: str) -> list[list[torch.Tensor]]:
    """By layer, the state [D, N] after each token, from the cache of the transformers library after each prefix."""
    found = network(architecture)
    with torch.no_grad():
        caches = [found(input_ids=torch.tensor([TOKENS[:end]]), use_cache=True).cache_params
                  for end in range(1, len(TOKENS) + 1)]
    return [[each.layers[layer].recurrent_states[0][0].double() for each in caches]
            for layer in range(len(caches[0].layers))]


def check(cls: type[SsmDynamics], architecture: str) -> None:
    states = library_states(architecture)
    events = read_by(cls(quantity="change"), model(architecture), TOKENS, START)
    changes = [[float((after - before).norm() / (after.norm() + before.norm())) for before, after in zip(
        layer[START - 1:], layer[START:])] for layer in states]
    assert shades(events) == pytest.approx([sum(column) / len(states) for column in zip(*changes)], abs=ROUNDING)
    norms = [[float(state.norm()) for state in layer[START:]] for layer in states]
    for found, expected in zip(named(events, "norm of the state")["values"], norms):
        assert found == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)


class WithoutDecay(SsmDynamics):
    """Wrong: A is read as stored, the logarithm of its negative."""

    def decay(self, layer):
        return -layer.block.mixer.A_log.double()


class OfTheTokenBefore(SsmDynamics):
    """Wrong: painted on the token that the row predicts."""

    def begin(self, text, model):
        super().begin(text._replace(start=text.start - 1, tokens=text.tokens[:-1]), model)


@pytest.mark.oracle("ssm_dynamics")
@pytest.mark.parametrize("architecture", TYPES)
def test_states_and_their_changes_are_those_of_the_librarys_cache(architecture):
    check(SsmDynamics, architecture)


@pytest.mark.refuses("ssm_dynamics")
@pytest.mark.parametrize("wrong", [WithoutDecay, OfTheTokenBefore])
def test_another_decay_or_row_fails(wrong):
    with pytest.raises(AssertionError):
        check(wrong, "mamba")


@pytest.mark.strategy("ssm_dynamics")
def test_pieces_of_a_text_continue_the_state_and_the_convolution(monkeypatch):
    whole = read_by(SsmDynamics(), model("mamba"), TOKENS, START)
    monkeypatch.setattr(overlay_reading, "PIECE", 2)
    parts = read_by(SsmDynamics(), model("mamba"), TOKENS, START)
    assert shades(parts) == pytest.approx(shades(whole), abs=ROUNDING)
    for name in ("norm of the state", "what the last token"):
        for one, other in zip(named(whole, name)["values"], named(parts, name)["values"]):
            assert one == pytest.approx(other, rel=ROUNDING, abs=ROUNDING)


@pytest.mark.strategy("ssm_dynamics")
@torch.inference_mode()
def test_the_hidden_attention_adds_up_to_the_output_of_the_mixer():
    """Sum over tokens of alpha and input, with the skip, times the gate: what the output projection reads."""
    from strategies.overlays.ssm_dynamics import hidden_attention
    found, seen = network("mamba"), []
    for block in found.backbone.layers:
        block.mixer.out_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0][0, -1].double()))
    with torch.no_grad():
        found(input_ids=torch.tensor([TOKENS]), use_cache=False)
    overlay = SsmDynamics()
    read_by(overlay, model("mamba"), TOKENS, START)
    for layer, expected in zip(overlay._layers, seen):
        rows = layer.parts[-1]
        inputs = torch.cat([part.inputs for part in layer.parts])
        alpha = hidden_attention(layer, overlay.decay(layer), len(TOKENS))
        mixed = (alpha * inputs).sum(0) + layer.block.mixer.D * inputs[-1]
        assert (mixed * silu(rows.gate[-1]) - expected).abs().max() < ROUNDING * expected.abs().max()


@pytest.mark.strategy("ssm_dynamics")
@torch.inference_mode()
def test_a_half_life_has_its_closed_value_and_a_model_without_mixers_is_refused():
    overlay = SsmDynamics()
    read_by(overlay, model("mamba"), TOKENS, START)
    layer = overlay._layers[0]
    layer.parts[:] = [part._replace(delta=torch.full_like(part.delta, 0.5)) for part in layer.parts]
    lives = overlay.half_lives(layer)
    kept = torch.exp(0.5 * overlay.decay(layer)) ** lives  # after so many tokens
    assert kept.tolist() == [pytest.approx([0.5] * kept.shape[1])] * kept.shape[0] and math.isfinite(lives.max())
    with pytest.raises(Refusal, match="reads the mixers of mamba"):
        overlay.check_target(pair().target)
