"""MaskLLM's mixtures of masks against their formula written out, its fit on a small network, and wrong variants."""
from __future__ import annotations

from itertools import combinations
from math import exp, log

import pytest
import torch
from toys import network

from playground.algorithms.weights.weight_training import language_loss
from playground.contract import find
from playground.engine.weights.linear_blocks import LinearBlocks
from strategies.weights.maskllm import GroupMasks
from support.calibrated_layers import inputs, random_weights
from support.wrong_variants import refused

MaskLLM = find("maskllm")
TEXTS = torch.randint(3, 320, (3, 16), generator=torch.Generator().manual_seed(0)).tolist()
OVER = 0.25  # of the training


def check_mixture(cls: type[GroupMasks]) -> None:
    """A weight times the shares of the masks that keep it: a softmax of (logits * sharpness + noise) / temperature."""
    own = cls.started(random_weights(3, 8), inputs(width=8), 2, 3.0)
    found = own.soft(OVER, torch.Generator().manual_seed(7)).tolist()
    drawn = torch.empty(own.logits.shape).exponential_(generator=torch.Generator().manual_seed(7)).tolist()
    sharpness, temperature = 100 + OVER * 400, 4 + OVER * (0.05 - 4)
    for row in range(3):
        for group in range(2):
            logits = own.logits[row, group].tolist()
            powers = [exp((logit * sharpness - log(noise)) / temperature)
                      for logit, noise in zip(logits, drawn[row][group])]
            for at in range(4):
                share = sum(power for power, pair in zip(powers, combinations(range(4), 2)) if at in pair)
                expected = float(own.weight[row, 4 * group + at]) * share / sum(powers)
                assert found[row][4 * group + at] == pytest.approx(expected, abs=1e-5)


class StaysAsSoft(GroupMasks):
    def soft(self, over, chance):
        return super().soft(0.0, chance)


class DrawsNoNoise(GroupMasks):
    def soft(self, over, chance):
        sharpness, temperature = 100 + over * 400, 4 + over * (0.05 - 4)
        return self._under((self.logits * sharpness / temperature).softmax(-1))


@pytest.mark.oracle("maskllm")
def test_weights_are_multiplied_by_the_shares_of_their_masks():
    check_mixture(GroupMasks)


@pytest.mark.refuses("maskllm")
@pytest.mark.parametrize("wrong", [StaysAsSoft, DrawsNoNoise])
def test_other_mixtures_are_noticed(wrong):
    refused(check_mixture, wrong)


def test_strong_first_masks_are_those_of_wanda_and_inputs_left_over_stay():
    weight, x = random_weights(5, 12), inputs(width=12)
    own = GroupMasks.started(weight, x, 2, 1000.0)
    assert torch.equal(own.hard(), find("wanda")(pattern="2:4").changed(weight, x).weight)
    short = GroupMasks.started(weight[:, :10], x[:, :10], 2, 1000.0).hard()
    assert torch.equal(short[:, 8:], weight[:, 8:10])


def loss(blocks: LinearBlocks) -> float:
    with torch.no_grad():
        return sum(float(language_loss(blocks.logits(ids), ids)) for ids in TEXTS)


def test_training_lowers_the_loss_of_the_pruned_network_and_leaves_kept_weights_as_they_are():
    plain, start, trained = (LinearBlocks(network(), TEXTS) for _ in range(3))
    MaskLLM(steps=0, samples=3).change(start)
    MaskLLM(steps=60, samples=3, rate=0.005).change(trained)
    assert loss(trained) < loss(start) - 0.05
    for name in plain.layers:
        new = trained.weight(name)
        assert (new != 0).unflatten(1, (-1, 4)).sum(-1).eq(2).all()
        assert torch.equal(new, plain.weight(name) * (new != 0))


def test_four_of_four_keep_every_tensor():
    blocks = LinearBlocks(network(), TEXTS)
    before = {name: layer.weight for name, layer in blocks.layers.items()}
    MaskLLM(kept=4).change(blocks)
    assert all(layer.weight is before[name] for name, layer in blocks.layers.items())
