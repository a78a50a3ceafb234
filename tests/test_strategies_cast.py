"""CAST's decay against its formula written out, its fit on a small network, and wrong variants."""
from __future__ import annotations

import pytest
import torch
from toys import network

from playground.algorithms.weights.weight_training import language_loss
from playground.contract import find
from playground.engine.weights.linear_blocks import LinearBlocks
from strategies.weights.cast import SparseDecay, scaled
from support.calibrated_layers import random_weights
from support.wrong_variants import refused

CAST = find("cast")
TEXTS = torch.randint(3, 320, (3, 16), generator=torch.Generator().manual_seed(0)).tolist()
RATE, GROWTH = 0.01, 0.5


def check_decay(cls: type[SparseDecay]) -> None:
    """After step 3, the two smallest of each four have shrunk by rate * growth * 3, times the mean size of gradients by
    their own, of at least a tenth of the mean, but not beyond 0; the others are as Adam left them.
    """
    weight = random_weights(3, 8).requires_grad_()
    optimiser = torch.optim.Adam([weight], lr=RATE)
    decay = cls(optimiser, "2:4", GROWTH)
    for step in range(3):
        weight.grad = torch.linspace(0.001, 2.0, 24).view(3, 8) * (step + 1)
        optimiser.step()
        before = weight.detach().clone()
        if step == 0:
            chosen = [sorted(range(4), key=lambda at, group=group: -abs(group[at]))[:2]
                      for row in before.tolist() for group in (row[:4], row[4:])]
        decay.after(step)
    sizes = optimiser.state[weight]["exp_avg_sq"].sqrt().flatten().tolist()
    mean = sum(sizes) / 24
    for at, (old, new) in enumerate(zip(before.flatten().tolist(), weight.flatten().tolist())):
        amount = RATE * GROWTH * 3 / max(sizes[at] / mean, 0.1)
        left = abs(old) if at % 4 in chosen[at // 4] else max(abs(old) - amount, 0)
        assert abs(new) == pytest.approx(left, abs=1e-6) and new * old >= 0


class DecaysEverything(SparseDecay):
    def after(self, step):
        super().after(step)
        self._outside = [torch.ones_like(outside) for outside in self._outside]


class DoesNotGrow(SparseDecay):
    def after(self, step):
        own = self._growth
        self._growth = own / (step + 1)
        super().after(step)
        self._growth = own


@pytest.mark.oracle("cast")
def test_weights_outside_the_pattern_shrink():
    check_decay(SparseDecay)


@pytest.mark.refuses("cast")
@pytest.mark.parametrize("wrong", [DecaysEverything, DoesNotGrow])
def test_other_decays_are_noticed(wrong):
    refused(check_decay, wrong)


def test_rows_keep_their_norm_and_each_four_their_largest_two():
    weight = random_weights(3, 10)
    found = scaled(weight, "2:4")
    assert torch.allclose(found.norm(dim=1), weight.norm(dim=1))
    kept = found[:, :8].unflatten(1, (-1, 4)) != 0
    assert kept.sum(-1).eq(2).all() and (found[:, 8:] != 0).all()
    sizes = weight[:, :8].unflatten(1, (-1, 4)).abs()
    assert (sizes.masked_fill(~kept, 9).amin(-1) >= sizes.masked_fill(kept, 0).amax(-1)).all()


def loss(blocks: LinearBlocks) -> float:
    with torch.no_grad():
        return sum(float(language_loss(blocks.logits(ids), ids)) for ids in TEXTS)


def test_training_into_the_pattern_loses_less_than_pruning_at_once():
    once, trained = (LinearBlocks(network(), TEXTS) for _ in range(2))
    CAST(steps=0).change(once)
    CAST(steps=60, decay=20.0, rate=0.0005).change(trained)
    assert loss(trained) < loss(once) - 0.2
    assert all((trained.weight(name) != 0).unflatten(1, (-1, 4)).sum(-1).le(2).all() for name in trained.layers)


def test_four_of_four_keep_every_tensor():
    blocks = LinearBlocks(network(), TEXTS)
    before = {name: layer.weight for name, layer in blocks.layers.items()}
    CAST(kept=4).change(blocks)
    assert all(layer.weight is before[name] for name, layer in blocks.layers.items())
