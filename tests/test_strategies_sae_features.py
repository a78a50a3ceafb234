"""Features of sparse autoencoders: against plain loops over the library's states, planted ones, published files."""
from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from itertools import islice

import pytest
import torch
from pairs import network, pair
from safetensors.torch import save_file

from playground.algorithms.overlays.sparse_autoencoder import (
    SparseAutoencoder,
    StateRows,
    principal_components,
    random_weights,
    train,
    unscaled,
)
from playground.contract import find
from playground.errors import Refusal
from playground.training.public_autoencoders import read_autoencoder
from support.overlay_runs import named, read_by, shades

SaeFeatures = find("sae_features")
TOKENS = [70, 71, 72, 70, 71, 90, 70, 71, 72, 91, 70]
START, LAYER, WIDTH, COUNT, MOST = 5, 2, 32, 40, 3


def autoencoder(seed: int = 0) -> SparseAutoencoder:
    chance = torch.Generator().manual_seed(seed)
    sizes = ((COUNT, WIDTH), (COUNT,), (COUNT, WIDTH), (WIDTH,))
    parts = [torch.randn(*size, generator=chance) for size in sizes]
    return SparseAutoencoder(*parts, torch.zeros(COUNT), MOST)


def stored(sae: SparseAutoencoder, **changed) -> dict[str, torch.Tensor]:
    return {**SaeFeatures.published(sae, LAYER), "largest": torch.linspace(20, 60, COUNT)} | changed


@cache
def library_states(layer: int) -> torch.Tensor:
    """The input of a layer, [n, d]."""
    model, seen = network("llama"), []
    model.model.layers[layer].register_forward_pre_hook(lambda module, given: seen.append(given[0][0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([TOKENS]), use_cache=False)
    return seen[0]


def activations(sae: SparseAutoencoder, state: torch.Tensor) -> list[float]:
    """By the definition, number by number."""
    sizes = [max(0.0, sum(float(w) * float(x) for w, x in zip(row, state)) + float(bias))
             for row, bias in zip(sae.encoder, sae.bias)]
    kept = sorted(range(len(sizes)), key=lambda number: -sizes[number])[:sae.most]
    return [size if number in kept else 0.0 for number, size in enumerate(sizes)]


def drawn(cls) -> list:
    overlay = cls()
    overlay.begin_fitted(stored(autoencoder()))
    return read_by(overlay, pair().target, TOKENS, START)


def check(cls) -> None:
    sae, events = autoencoder(), drawn(cls)
    largest = stored(sae)["largest"].tolist()
    rows = [activations(sae, state) for state in library_states(LAYER)[START:]]
    expected = [min(1.0, max(size / most for size, most in zip(row, largest))) for row in rows]
    assert shades(events) == pytest.approx(expected, abs=1e-3) and max(expected) > 0.3
    matrix = named(events, "features by token")
    for name, values in zip(matrix["rows"], matrix["values"]):
        number = int(name.split()[1])
        assert values == pytest.approx([row[number] / largest[number] for row in rows], abs=1e-3)


class OfAnotherLayer(SaeFeatures):
    """Wrong: the state one layer earlier."""

    def layers(self, depth):
        return (self._layer - 1,)


class OfTheTokenBefore(SaeFeatures):
    """Wrong: painted on the token that the row predicts."""

    def begin(self, text, model):
        super().begin(text._replace(start=text.start - 1, tokens=text.tokens[:-1]), model)


class WithoutTheLimit(SaeFeatures):
    """Wrong: every positive feature is active."""

    def begin_fitted(self, weights):
        super().begin_fitted({**weights, "most": torch.tensor(0)})


@pytest.mark.oracle("sae_features")
def test_active_features_are_those_of_the_librarys_states():
    check(SaeFeatures)


@pytest.mark.refuses("sae_features")
@pytest.mark.parametrize("wrong", [OfAnotherLayer, OfTheTokenBefore, WithoutTheLimit])
def test_another_layer_another_row_and_all_features_fail(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


# --- training ---

class Kept:
    """Keeps the states of a training, which stops after one of them."""

    def __init__(self, saved: dict | None = None):
        self.saved = saved

    def resumed(self):
        return self.saved

    def save(self, state):
        self.saved = deepcopy(state)


def finished(training):
    while True:
        try:
            next(training)
        except StopIteration as end:
            return end.value


def planted(count: int = 3000) -> tuple[StateRows, torch.Tensor]:
    """States that are sums of three of 24 orthogonal-ish directions, and the directions."""
    chance = torch.Generator().manual_seed(3)
    directions = torch.nn.functional.normalize(torch.randn(24, 16, generator=chance))
    which = torch.rand(count, 24, generator=chance).topk(3, 1).indices
    sizes = torch.zeros(count, 24).scatter(1, which, 1 + torch.rand(count, 3, generator=chance))
    return StateRows.of(sizes @ directions), directions


@pytest.fixture
def short(monkeypatch):
    from playground.algorithms.kv_cache.cache_training import Descent
    from playground.algorithms.overlays import sparse_autoencoder as module
    monkeypatch.setattr(module, "PLAN", Descent("loss", 600, 5e-3, every=300))
    monkeypatch.setattr(module, "ACTIVE", 4)


@pytest.mark.strategy("sae_features")
def test_a_trained_autoencoder_explains_sparse_states_better_than_principal_components_and_its_beginning(short):
    states, _ = planted()
    sae, first = finished(train(states, 0, Kept())), unscaled(random_weights(16, 0), states)
    centred = states.rows - states.mean
    project = principal_components(states, sae.most)
    missed = [float((found - states.rows).square().sum() / centred.square().sum()) for found in (
        sae.decode(sae.encode(states.rows)), centred @ project + states.mean, first.decode(first.encode(states.rows)))]
    assert sae.decoder.norm(dim=1).sub(1).abs().max() < 1e-5
    assert missed[0] < 0.1 < 0.3 < missed[1] and missed[0] < missed[2] / 3


@pytest.mark.strategy("sae_features")
def test_an_interrupted_training_ends_as_one_that_was_not(short):
    states, _ = planted(500)
    whole, kept = finished(train(states, 1, Kept())), Kept()
    list(islice(train(states, 1, kept), 1))  # half of the steps
    assert kept.saved["step"] == 300
    again = finished(train(states, 1, kept))
    assert all(torch.equal(one, other) for one, other in zip(whole[:-1], again[:-1]))


@pytest.mark.strategy("sae_features")
def test_the_bundled_one_recovers_more_of_the_loss_than_its_controls():
    from playground.decoding.fitted_weights import BUNDLED_FITTED, _read
    weights, _ = _read(BUNDLED_FITTED / "sae_features-pocket.safetensors")
    trained, components, untrained = weights["recovered"].tolist()
    assert trained > 0.9 > untrained + 0.3 and trained > components + 0.5
    assert (weights["examples"] >= 0).any(1).float().mean() > 0.95  # nearly every feature was active somewhere


# --- published ones ---

def publish(folder, config: dict, **weights) -> None:
    (folder / "cfg.json").write_text(json.dumps(config))
    save_file({name.replace("__", "."): tensor.contiguous() for name, tensor in weights.items()},
              folder / "sae_weights.safetensors")


LENS = {"architecture": "jumprelu", "hook_name": "blocks.1.hook_resid_post", "apply_b_dec_to_input": True}


def lens(folder, config: dict = LENS, width: int = WIDTH) -> SparseAutoencoder:
    sae = autoencoder(1)
    publish(folder, config, W_enc=sae.encoder.T[:width], b_enc=sae.bias, W_dec=sae.decoder[:, :width],
            b_dec=sae.centre[:width], threshold=torch.full((COUNT,), 2.0))
    return sae


@pytest.mark.strategy("sae_features")
def test_saes_of_sae_lens_compute_what_their_library_computes(tmp_path):
    own = lens(tmp_path)
    sae, layer = read_autoencoder(tmp_path, pair().target)
    states = library_states(2).float()
    sizes = (states - own.centre) @ own.encoder.T + own.bias  # their forward: relu, where above the threshold
    wanted = sizes.relu() * (sizes > 2.0)
    assert layer == 2 and (sae.encode(states) - wanted).abs().max() < 1e-3 and 0 < (wanted > 0).sum() < wanted.numel()
    assert torch.allclose(sae.decode(wanted), wanted @ own.decoder + own.centre, atol=1e-4)


@pytest.mark.strategy("sae_features")
def test_saes_of_sparsify_keep_their_largest_features(tmp_path):
    folder, own = tmp_path / "layers.1", autoencoder(1)
    folder.mkdir()
    publish(folder, {"k": 4}, encoder__weight=own.encoder, encoder__bias=own.bias, W_dec=own.decoder, b_dec=own.centre)
    sae, layer = read_autoencoder(folder, pair().target)
    states = library_states(2).float()
    best = ((states - own.centre) @ own.encoder.T + own.bias).relu().topk(4, 1)
    assert layer == 2 and (sae.encode(states).gather(1, best.indices) - best.values).abs().max() < 1e-3
    assert (sae.encode(states) > 0).sum(1).max() <= 4


@pytest.mark.strategy("sae_features")
@pytest.mark.parametrize("change, width, says", [
    ({"architecture": "gated"}, WIDTH, "not supported"),
    ({"normalize_activations": "layer_norm"}, WIDTH, "not supported"),
    ({"hook_name": "blocks.1.attn.hook_z"}, WIDTH, "states between layers"),
    ({"hook_name": "blocks.7.hook_resid_pre"}, WIDTH, "choose one for this model"),
    ({}, WIDTH - 1, "choose one for this model"),
    ({"metadata": 3}, WIDTH, "does not describe"),
])
def test_other_autoencoders_are_refused_in_a_sentence(tmp_path, change, width, says):
    lens(tmp_path, LENS | change, width)
    with pytest.raises(Refusal, match=says):
        read_autoencoder(tmp_path, pair().target)
