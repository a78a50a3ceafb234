"""Switched parts against the library's network with the same part changed by hand, and parts that change nothing."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from runs import run

from playground.algorithms.overlays.sparse_autoencoder import SparseAutoencoder
from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from support.compute_runs import PROMPT, deep, deep_network, policy_lane

COLLAPSES = {
    "switch_part": [
        Collapse(policy_lane("switch_part", parts=""), LaneConfig("greedy")),
        Collapse(policy_lane("switch_part", "sample", parts="head 0.0", state="on"), LaneConfig("sample")),
    ],
}
SwitchPart = find("switch_part")
LENGTH, WIDTH, FEATURES, AT = 14, 32, 24, 3
PARTS = "head 1.2, neuron 2.7, neuron 2.11, feature 5"


def autoencoder() -> SparseAutoencoder:
    """Features that are active about half of the time, in float64 as the network."""
    chance = torch.Generator().manual_seed(0)
    sizes = ((FEATURES, WIDTH), (FEATURES,), (FEATURES, WIDTH), (WIDTH,))
    return SparseAutoencoder(*(torch.randn(*size, generator=chance) for size in sizes), torch.zeros(FEATURES))


def stored() -> dict[str, torch.Tensor]:
    return {**autoencoder().tensors(torch.float32), "layer": torch.tensor(AT), "largest": torch.full((FEATURES,), 6.0)}


def library_text(level: float) -> list[int]:
    """Greedy decoding of the library's network with the parts changed by hooks."""
    network, sae = deep_network(), autoencoder()
    layers, size = network.model.layers, network.config.head_dim

    def head(module, given):
        rows = given[0].clone()
        rows[..., 2 * size:3 * size] *= level
        return (rows,)

    def neurons(module, given):
        rows = given[0].clone()
        rows[..., 7] = rows[..., 11] = level
        return (rows,)

    def feature(module, given, out):
        state = out[0] if isinstance(out, tuple) else out
        active = (state.float() @ sae.encoder[5] + sae.bias[5]).clamp(min=0)
        return state + ((6.0 * level - active)[..., None] * sae.decoder[5]).double()

    layers[1].self_attn.o_proj.register_forward_pre_hook(head)
    layers[2].mlp.down_proj.register_forward_pre_hook(neurons)
    layers[AT - 1].register_forward_hook(feature)
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(LENGTH):
            ids.append(int(network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


def lane_text(policy, monkeypatch) -> list[int]:
    from playground.decoding import fitted_weights as fitted
    monkeypatch.setattr(fitted, "find_all", lambda parts, models, given=None: {part.name: stored() for part in parts})
    lane, _ = run(Assembly(make("greedy"), compute_policy=policy), {"target": deep()}, PROMPT, LENGTH)
    return lane.tokens


class InTheLayerBefore(SwitchPart):
    """Wrong: a feature of the state before a layer is switched one layer late."""

    def begin(self, parts, weights):
        super().begin(parts, {**weights, "layer": weights["layer"] + 1})


class AddsInsteadOfHolding(SwitchPart):
    """Wrong: the neuron keeps what it had, and the strength is added."""

    def channel(self, part):
        own = super().channel(part)
        return type(own)(own.gate_up, own.down.replaced(own.down.weight * 0))


SETTINGS = [("off", 1.0, 0.0), ("on", 2.0, 2.0)]


def check(cls, monkeypatch) -> None:
    plain = lane_text(cls(parts=""), monkeypatch)
    for state, strength, level in SETTINGS:
        found = lane_text(cls(parts=PARTS, state=state, strength=strength), monkeypatch)
        assert found == library_text(level) != plain


@pytest.mark.oracle("switch_part")
def test_texts_are_those_of_the_librarys_network_with_the_parts_changed_by_hand(monkeypatch):
    check(SwitchPart, monkeypatch)


@pytest.mark.refuses("switch_part")
@pytest.mark.parametrize("wrong", [InTheLayerBefore, AddsInsteadOfHolding])
def test_another_layer_and_an_addition_fail(wrong, monkeypatch):
    with pytest.raises(AssertionError):
        check(wrong, monkeypatch)


@pytest.mark.strategy("switch_part")
def test_a_neuron_that_writes_nothing_changes_nothing_however_it_is_held():
    network = deep_network()
    with torch.no_grad():
        network.model.layers[2].mlp.down_proj.weight[:, 7] = 0
    from pairs import TOKENIZER

    from playground.engine.model import Model
    model = Model(network, TOKENIZER, "llama")
    texts = [run(policy_lane("switch_part", parts=parts, state="on", strength=9.0), {"target": model}, PROMPT, LENGTH)
             [0].tokens for parts in ("", "neuron 2.7")]
    assert texts[0] == texts[1]


@pytest.mark.strategy("switch_part")
@pytest.mark.parametrize("parts, says", [
    ("mouth 3.1", 'write "head 3.1"'), ("head 3", 'write "head 3.1"'), ("head 0.1, " * 80, "more than 64"),
])
def test_names_of_no_part_are_refused(parts, says):
    with pytest.raises(Refusal, match=says):
        make("switch_part", parts=parts).check()


@pytest.mark.strategy("switch_part")
@pytest.mark.parametrize("parts, says", [
    ("head 9.0", "layers 0 to 5"), ("head 0.99", "choose a head from 0 to"), ("neuron 0.48", "from 0 to 47"),
    ("feature 24", "from 0 to 23"),
])
def test_parts_that_the_model_does_not_have_are_refused(parts, says):
    with pytest.raises(Refusal, match=says):
        SwitchPart(parts=parts).begin(deep().parts, stored())


@pytest.mark.strategy("switch_part")
def test_a_feature_without_a_fitted_autoencoder_is_refused():
    with pytest.raises(Refusal, match="fit sae_features.*neuron or a head instead"):
        run(policy_lane("switch_part", parts="feature 3"), {"target": deep()}, PROMPT, 2)
