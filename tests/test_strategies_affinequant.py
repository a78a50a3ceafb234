"""AffineQuant's rounding against its formula written out, what it learns against the start, and wrong variants."""
from __future__ import annotations

from math import exp

import pytest
import torch
from toys import network

from playground.contract import Strategy, find
from playground.engine.weights.linear_blocks import LinearBlocks
from strategies.weights.affinequant import AffineRounding, block_error
from support.calibrated_layers import inputs, random_weights
from support.wrong_variants import refused

AffineQuant = find("affinequant")
TEXTS = torch.randint(3, 320, (4, 16), generator=torch.Generator().manual_seed(0)).tolist()
BLOCK = "model.layers.0."


def rounding(change: Strategy, cls: type[AffineRounding] = AffineRounding) -> AffineRounding:
    """Of two layers that read the same, and of one that reads something else."""
    same = inputs(width=8)
    weights = {"q": random_weights(5, 8), "k": random_weights(3, 8), "down": random_weights(4, 8)}
    return cls(change, weights, {"q": same, "k": same, "down": same.clone()})


def on_grid(row: list[float], bits: int) -> list[float]:
    """A group on the grid between its ends, which are drawn in to sigmoid(4) of themselves."""
    share, last = 1 / (1 + exp(-4.0)), 2 ** bits - 1
    low, top = min(0.0, *row) * share, max(0.0, *row) * share
    scale = (top - low) / last
    zero = round(-low / scale)
    return [(min(max(round(value / scale) + zero, 0), last) - zero) * scale for value in row]


def check_rounding(cls: type[AffineRounding]) -> None:
    """Each weight is that of the grid under the matrix A, with A undone: W' = Q(W A') A'^-1."""
    own = rounding(AffineQuant(bits=4, group=0, spread=0.5, epochs=2), cls)
    chance = torch.Generator().manual_seed(5)
    matrix = own.matrices["q"].detach() + 0.2 * torch.randn(8, 8, generator=chance)
    own.matrices["q"] = matrix
    found = own.matrices_undone(1)
    opened = [[float(matrix[i, j]) * (1 if i == j else 0.5) for j in range(8)] for i in range(8)]
    inverse = torch.linalg.inv(torch.tensor(opened).double().T)
    for name in ("q", "k"):
        under = [[sum(w * opened[i][j] for j, w in enumerate(row)) for i in range(8)]
                 for row in own.weights[name].tolist()]
        expected = torch.tensor([on_grid(row, 4) for row in under]).double() @ inverse
        assert torch.allclose(found[name].double(), expected, atol=1e-4)
    assert torch.allclose(found["down"], torch.tensor([on_grid(row, 4) for row in own.weights["down"].tolist()]))


class ForgetsToUndo(AffineRounding):
    def _under(self, matrix, name):
        return super()._under(matrix, name) @ (torch.eye(8) if matrix is None else matrix.T)


class TurnsTheMatrix(AffineRounding):
    def _opened(self, matrix, epoch):
        return super()._opened(matrix, epoch).T


class StaysDiagonal(AffineRounding):
    def _opened(self, matrix, epoch):
        return super()._opened(matrix, 0)


@pytest.mark.oracle("affinequant")
def test_weights_are_rounded_under_the_matrices():
    check_rounding(AffineRounding)


@pytest.mark.refuses("affinequant")
@pytest.mark.parametrize("wrong", [ForgetsToUndo, TurnsTheMatrix, StaysDiagonal])
def test_other_roundings_are_noticed(wrong):
    refused(check_rounding, wrong)


def test_matrices_begin_as_scales_of_inputs_against_weights():
    own = rounding(AffineQuant(exponent=0.75, group=0))
    largest = torch.maximum(own.weights["q"].abs().amax(0), own.weights["k"].abs().amax(0))
    expected = inputs(width=8).abs().amax(0) ** 0.75 / largest ** 0.25
    diagonal = own.matrices["q"].detach().diagonal()
    assert torch.allclose(diagonal / diagonal[0], expected / expected[0]) and list(own.matrices) == ["q"]


def test_diagonals_open_from_the_main_one_to_all_of_them():
    own, ones = rounding(AffineQuant(epochs=4, spread=0.1, group=0)), torch.ones(8, 8)
    counts = [int((own._opened(ones, epoch) != 0).sum(1).max()) for epoch in range(4)]
    assert counts == [1, 5, 8, 8] and own._opened(ones, 3).diagonal().eq(1).all()
    assert float(own._opened(ones, 3)[0, 7]) == pytest.approx(0.1)


def test_learning_brings_the_output_closer_than_the_start_and_than_round_to_nearest():
    plain, blocks = LinearBlocks(network(), TEXTS), LinearBlocks(network(), TEXTS)
    AffineQuant(bits=2, group=16, epochs=40).change(blocks)
    block = plain.blocks[0]
    given = [states.clone() for states in plain.states(0)]
    wanted = [block.run(states, text) for text, states in enumerate(given)]
    rows = {name: plain.weight(name) for name in block.layers}
    rtn = {name: find("rtn")(bits=2, group=16).changed(weight, None).weight for name, weight in rows.items()}
    start = AffineRounding(AffineQuant(bits=2, group=16), rows, block.inputs()).matrices_undone(0)
    own = {name: blocks.weight(name) for name in block.layers}
    errors = [block_error(block, weights, given, wanted)[0] for weights in (own, start, rtn)]
    assert errors[0] < 0.9 * errors[1] and errors[0] < 0.9 * errors[2]


def test_sixteen_bits_keep_every_tensor():
    blocks = LinearBlocks(network(), TEXTS)
    before = {name: layer.weight for name, layer in blocks.layers.items()}
    AffineQuant(bits=16).change(blocks)
    assert all(layer.weight is before[name] for name, layer in blocks.layers.items())
    assert not blocks.bits


def test_matrices_count_unless_they_merge_into_a_norm():
    full, diagonal = (rounding(AffineQuant(bits=4, group=0, spread=spread)) for spread in (0.1, 0.0))
    assert diagonal.stored_bits("q") == full.stored_bits("down") == 4 + 20 / 8
    assert full.stored_bits("k") == 4 + 20 / 8 + 16 * 64 / (5 * 8 + 3 * 8)
