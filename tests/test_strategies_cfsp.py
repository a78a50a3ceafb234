"""CFSP: which channels calibration keeps, and that leaving them out equals a smaller network."""
from __future__ import annotations

import math

import pytest
import torch
from architectures import SIZES
from registry import Collapse
from runs import run
from torch.nn.functional import silu

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.engine.model import Model
from playground.events import Note
from playground.training.calibration import CalibrationTexts
from support.compute_runs import PROMPT, deep, deep_network, policy_lane

COLLAPSES = {
    "cfsp": [
        Collapse(policy_lane("cfsp", ratio=0.0), LaneConfig("greedy")),
        Collapse(policy_lane("cfsp", "sample", ratio=0.0), LaneConfig("sample")),
    ],
}
CFSP = find("cfsp")
shares = CFSP._shares.__globals__["kept_shares"]
TEXTS = [[5, 9, 2, 7, 7, 1, 30, 31], [17, 3, 3, 8], list(range(40, 60))]


def calibrated(model: Model, cls=CFSP) -> dict[str, torch.Tensor]:
    events = cls.calibrate(CalibrationTexts(model, TEXTS), 0)
    while True:
        try:
            next(events)
        except StopIteration as end:
            return end.value


def caught_states(network, ids: list[int]) -> dict:
    """Input and output of every block, and the channels of its FFN, from the library's forward."""
    caught, handles = {}, []
    for number, layer in enumerate(network.model.layers):
        handles.append(layer.mlp.down_proj.register_forward_pre_hook(
            lambda module, given, number=number: caught.update({number: given[0][0]})))
        handles.append(layer.register_forward_hook(
            lambda module, given, out, number=number: caught.update({("in", number): given[0][0],
                                                                     ("out", number): out[0]})))
    with torch.no_grad():
        network(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return caught


def by_hand(network) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Sum of the turns of each block, the root mean square of every channel, and the tokens."""
    depth = len(network.model.layers)
    turned, squares, tokens = torch.zeros(depth), [0.0] * depth, 0
    for ids in TEXTS:
        caught, tokens = caught_states(network, ids), tokens + len(ids)
        for number in range(depth):
            squares[number] = squares[number] + caught[number].square().sum(0)
            for x, y in zip(caught["in", number], caught["out", number]):
                turned[number] += math.acos(float(x @ y / (x.norm() * y.norm()))) / math.pi
    return turned, torch.stack([(each / tokens).sqrt() for each in squares]), tokens


@torch.no_grad()
def pruned_network(weights: dict[str, torch.Tensor], kept: list[int]):
    """The network with every FFN rebuilt from its most active channels, in the library's own class."""
    network = deep_network()
    for layer, count, activations in zip(network.model.layers, kept, weights["activations"]):
        rows, mlp = activations.argsort(descending=True)[:count], layer.mlp
        mlp.gate_proj.weight = torch.nn.Parameter(mlp.gate_proj.weight[rows])
        mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight[rows])
        mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight[:, rows])
    return network


def library_text(network, length: int) -> list[int]:
    ids = list(PROMPT)
    with torch.no_grad():
        for _ in range(length):
            ids.append(int(network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


class KeepsTheQuietest(CFSP):
    """Keeps the channels that are active least."""

    def begin(self, parts, weights):
        super().begin(parts, {**weights, "activations": -weights["activations"]})


class ForgetsTheDivisor(CFSP):
    """Uses the released divisor for the few calibration tokens there are, so that all blocks keep alike."""

    def begin(self, parts, weights):
        super().begin(parts, {**weights, "tokens": torch.tensor(131072 * 10)})


def lane_text(policy, weights, monkeypatch, length: int = 14) -> list[int]:
    from playground.decoding import fitted_weights as fitted
    monkeypatch.setattr(fitted, "find_all", lambda parts, models, given=None: {part.name: weights for part in parts})
    lane, _ = run(Assembly(make("greedy"), compute_policy=policy), {"target": deep()}, PROMPT, length)
    return lane.tokens


def agrees(cls, monkeypatch) -> bool:
    weights, ratio = calibrated(deep()), 0.6
    turned, rms, tokens = by_hand(deep_network())
    deviations = (turned - turned.mean()) / (1e4 * tokens / 131072)
    sigma = torch.sigmoid(deviations.double())
    assert float(sigma.max() / sigma.mean()) < 2.5, "the case without shrinking"
    kept = [int(share * SIZES["intermediate_size"]) for share in (sigma / sigma.mean() * (1 - ratio)).tolist()]
    network = pruned_network({"activations": rms}, kept)
    expected = library_text(network, 14)
    return lane_text(cls(ratio=ratio, multiple=1), weights, monkeypatch) == expected


@pytest.mark.oracle("cfsp")
def test_the_text_is_that_of_a_network_pruned_by_hand_after_the_librarys_own_forward(monkeypatch):
    assert agrees(CFSP, monkeypatch)


@pytest.mark.refuses("cfsp")
@pytest.mark.parametrize("cls", [KeepsTheQuietest, ForgetsTheDivisor])
def test_the_pruned_network_refuses_quiet_channels_and_equal_shares(cls, monkeypatch):
    assert not agrees(cls, monkeypatch)


@pytest.mark.oracle("cfsp")
def test_calibration_measures_what_the_librarys_forward_shows():
    weights, (turned, rms, tokens) = calibrated(deep()), by_hand(deep_network())
    assert int(weights["tokens"]) == tokens
    assert torch.allclose(weights["turned"], turned, atol=1e-4)
    assert torch.allclose(weights["activations"].double(), rms.double(), atol=1e-5)


@pytest.mark.parametrize("ratio", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("contrast", [0.0, 1.0, 4.0])
def test_shares_average_to_what_is_kept_and_none_exceeds_the_whole(ratio, contrast):
    importance = torch.tensor([9.0, 4.0, 2.0, 2.0, 1.5, 1.0])
    found = shares(importance, 100, ratio, contrast)
    assert float(found.mean()) == pytest.approx(1 - ratio, abs=1e-9)
    assert float(found.max()) <= 1 and bool((found.diff() <= 1e-12).all()), "a more important block keeps no less"
    if contrast == 0:
        assert found.tolist() == pytest.approx([1 - ratio] * 6)


def test_a_block_that_is_the_identity_turns_nothing():
    network = deep_network()
    network.model.layers[3].mlp.down_proj.weight.data.zero_()
    network.model.layers[3].self_attn.o_proj.weight.data.zero_()
    weights = calibrated(Model(network, deep().tokenizer, "llama"))
    assert float(weights["turned"][3]) == pytest.approx(0, abs=1e-5) and int(weights["turned"].argmin()) == 3


@pytest.mark.parametrize("score", ["activation", "product"])
def test_at_equal_shares_a_higher_ratio_leaves_out_more_of_the_same_order(score, monkeypatch):
    kept = {}
    for ratio in (0.2, 0.5):
        policy = CFSP(ratio=ratio, contrast=0.0, score=score, multiple=1)
        parts = Parts(deep())
        policy.begin(parts, calibrated(deep()))
        kept[ratio] = parts.kept
    assert all(kept[0.5][layer] < kept[0.2][layer] for layer in range(6))


class Parts:
    """Passes on to a network's parts and notes which channels were asked for."""

    def __init__(self, model: Model):
        self._parts, self.kept, self.depth = model.parts, {}, model.depth

    def output_norms(self, layer: int):
        return self._parts.output_norms(layer)

    def narrowed(self, layer: int, channels):
        self.kept[layer] = set(channels.tolist())
        return self._parts.narrowed(layer, channels)


def test_a_narrowed_network_computes_what_its_remaining_channels_add():
    model, hidden = deep(), torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mlp, channels = deep_network().model.layers[1].mlp, torch.tensor([0, 7, 8, 40])
    with torch.no_grad():
        acts = silu(hidden @ mlp.gate_proj.weight.T) * (hidden @ mlp.up_proj.weight.T)
        mask = torch.zeros(48, dtype=torch.float64)
        mask[channels] = 1
        expected = (acts * mask) @ mlp.down_proj.weight.T
        assert (model.parts.narrowed(1, channels)(hidden) - expected).abs().max() < 1e-12


def test_widths_are_rounded_to_the_nearest_multiple_and_never_exceed_the_network():
    for multiple, wanted, count in [(1, 30.9, 30), (16, 30.9, 32), (16, 23.0, 16), (32, 47.0, 32), (40, 46.0, 40)]:
        assert CFSP(multiple=multiple)._count(wanted, 48) == count
    assert CFSP(multiple=40)._count(61.0, 48) == 48


def test_without_a_fit_it_says_so_and_keeps_the_channels_with_the_largest_output_weights():
    parts, policy = Parts(deep()), CFSP(ratio=0.5, multiple=1)
    policy.begin(parts, {})
    norms = deep_network().model.layers[2].mlp.down_proj.weight.detach().norm(dim=0)
    assert parts.kept[2] == set(norms.topk(24).indices.tolist())
    _, events = run(policy_lane("cfsp"), {"target": deep()}, PROMPT, 4)
    assert [event.text for event in events if isinstance(event, Note)][0].startswith("No calibration for this model")
