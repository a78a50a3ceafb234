"""AffineQuant: matrices around rounded weights, learnt block by block."""
from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, pad

from playground.algorithms.weights.grouped_rounding import SMALLEST, WHOLE, group_size, stored_bits
from playground.contract import CalibratedChange, knob

CLIP, CLIP_RATE = 4.0, 0.01  # of the ends of a grid, under a sigmoid: they begin at 0.98 of the span
TOGETHER = 4  # texts of a step
MATRIX_BITS = 16


class AffineQuant(CalibratedChange):
    """Multiply weights by an invertible matrix before rounding, and their inputs by its inverse, so that they round
    better.

    One matrix belongs to the query, key and value projections of a block, one to gate and up. They are learnt, with the
    ends of each grid, by how close the block's output is to that of the original. They begin as diagonal scales of
    inputs against weights; more and more diagonals beside the main one open, which keeps them invertible. Weights are
    stored with the matrices undone; the matrices take 16 bits a number, which is much for a small model. Without
    `spread` they stay diagonal, as in OmniQuant, and merge into the norms before. Left out: matrices between value and
    output projections. Ma et al. 2024, arXiv 2403.12544.
    """

    name, title, paper, sheet = "affinequant", "AffineQuant", "2403.12544", "weights/affinequant"
    adjective, guarantee, needs = "quantised by AffineQuant", ("heuristic",), ("corpus",)

    bits: int = knob(4, 2, 16, step=1, help="bits of a weight; 16 rounds nothing")
    group: int = knob(64, 0, 1024, step=16, help="inputs that share a scale; 0: all of a row")
    epochs: int = knob(6, 0, 40, step=1, help="over the calibration texts, for each block; 0: the scales at the start")
    spread: float = knob(0.1, 0.0, 1.0, help="of what is learnt beside the diagonal; 0: the matrices stay diagonal")
    exponent: float = knob(0.5, 0.0, 1.0, help="of the size of inputs in the scales at the start")
    rate: float = knob(0.005, 0.00001, 0.1, help="step of Adam for the matrices")

    def change(self, blocks):
        if self.bits == WHOLE:
            return
        whole = blocks.states(0)  # what the original's block reads
        for block in blocks:
            wanted = [block.run(states, text) for text, states in enumerate(whole)]
            rounding = AffineRounding(self, {name: blocks.weight(name) for name in block.layers}, block.inputs())
            for name, weight in self._learnt(rounding, block, wanted).items():
                blocks.put(name, weight, rounding.stored_bits(name))
            whole = wanted

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _learnt(self, rounding: AffineRounding, block, wanted: list[Tensor]) -> dict[str, Tensor]:
        """The weights [out, in] after the epoch with the least error of the block's output, or at the start."""
        given = [states.clone() for states in block.whole.states(block.index)]
        optimiser = torch.optim.Adam([{"params": list(rounding.matrices.values()), "lr": self.rate},
                                      {"params": list(rounding.ends.values()), "lr": CLIP_RATE}])
        best = block_error(block, rounding.matrices_undone(0), given, wanted)
        for epoch in range(self.epochs):
            for first in range(0, len(given), TOGETHER):
                weights = rounding.matrices_undone(epoch)
                loss = sum(mse_loss(block.run(given[text], text, weights), wanted[text])
                           for text in range(first, min(first + TOGETHER, len(given))))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            best = min(best, block_error(block, rounding.matrices_undone(epoch), given, wanted), key=lambda own: own[0])
        return best[1]


class AffineRounding:
    """The weights [out, in] of a block, and what their rounding learns.

    matrices: [in, in], by the first of the layers that read the same. ends: [2, out, groups], of the grid of each.
    """

    def __init__(self, change: AffineQuant, weights: dict[str, Tensor], inputs: dict[str, Tensor]):
        self.change = change
        self.weights = {name: weights[name].clone() for name in inputs}  # loaded weights may allow no gradients
        self._same = same_inputs(inputs)
        self.matrices = {names[0]: self._scales(names, inputs[names[0]]).diag().requires_grad_()
                         for names in self._same if len(names) > 1}
        self.ends = {name: weight.new_full((2, len(weight), self._groups(weight)), CLIP).requires_grad_()
                     for name, weight in self.weights.items()}

    def matrices_undone(self, epoch: int) -> dict[str, Tensor]:
        """The weights [out, in] rounded under their matrices as far as these are open in an epoch, which are undone
        after that.
        """
        found = {}
        for first, *others in self._same:
            matrix = self._opened(self.matrices[first], epoch) if others else None
            for name in (first, *others):
                found[name] = self._under(matrix, name)
        return found

    def stored_bits(self, name: str) -> float:
        """Of a weight of a layer, with its share of a matrix that no norm can take in."""
        bits, weight = self.change.bits, self.weights[name]
        sharing = next(names for names in self._same if name in names)
        full = len(sharing) > 1 and self.change.spread and self.change.epochs > 1
        share = weight.shape[1] ** 2 / sum(self.weights[other].numel() for other in sharing) if full else 0
        return stored_bits(bits, self.change.group, weight.shape[1], False) + MATRIX_BITS * share

    def _under(self, matrix: Tensor | None, name: str) -> Tensor:
        weight = self.weights[name]
        if matrix is None:
            return self._rounded(weight, self.ends[name])
        return torch.linalg.solve(matrix.T, self._rounded(weight @ matrix.T, self.ends[name]), left=False)

    def _opened(self, matrix: Tensor, epoch: int) -> Tensor:
        """The matrix with the diagonals that are open: in the first epoch the main one, in the last all of them."""
        size = len(matrix)
        beside = (size - 1) * epoch // max(self.change.epochs - 1, 1)
        place = torch.arange(size, device=matrix.device)
        distance = (place[:, None] - place).abs()
        return matrix * ((distance == 0) + self.change.spread * ((distance > 0) & (distance <= beside)))

    def _scales(self, names: list[str], inputs: Tensor) -> Tensor:
        """Where the matrix begins [in]: sizes of inputs [n, in] against those of the weights that read them."""
        largest = torch.stack([self.weights[name].abs().amax(0) for name in names]).amax(0).clamp(min=SMALLEST)
        seen = inputs.abs().amax(0).clamp(min=SMALLEST)
        scales = seen ** self.change.exponent / largest ** (1 - self.change.exponent)
        return scales / (scales.max() * scales.min()).sqrt()

    def _groups(self, weight: Tensor) -> int:
        return math.ceil(weight.shape[1] / group_size(self.change.group, weight.shape[1]))

    def _rounded(self, weight: Tensor, ends: Tensor) -> Tensor:
        """The weights on grids whose ends are drawn in, through which gradients flow."""
        size, last = group_size(self.change.group, weight.shape[1]), 2 ** self.change.bits - 1
        parts = pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
        low, top = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        low, top = (edge * part for edge, part in zip((low, top), ends.sigmoid()))
        scale = ((top - low) / last).clamp(min=SMALLEST)[..., None]
        zero = to_whole(-low[..., None] / scale)
        codes = (to_whole(parts / scale) + zero).clamp(0, last)
        return ((codes - zero) * scale).flatten(1)[:, :weight.shape[1]]


def to_whole(numbers: Tensor) -> Tensor:
    """The nearest whole numbers, with the gradient of what was rounded."""
    return numbers + (numbers.round() - numbers).detach()


def same_inputs(inputs: dict[str, Tensor]) -> list[list[str]]:
    """The names of layers that read the same tensor, together."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, read in inputs.items():
        found[id(read)].append(name)
    return list(found.values())


def block_error(block, weights: dict[str, Tensor], given: list[Tensor], wanted: list[Tensor]
                ) -> tuple[float, dict[str, Tensor]]:
    """The mean squared error of a block's output with these weights over all texts, and the weights."""
    plain = {name: weight.detach() for name, weight in weights.items()}
    with torch.no_grad():
        errors = [float(mse_loss(block.run(states, text, plain), wanted[text])) for text, states in enumerate(given)]
    return sum(errors), plain
