"""ARMOR: a sparse core between two block-diagonal matrices."""
from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from playground.algorithms.weights.pruning_masks import WHOLE, outside_pattern, pruned_bits
from playground.contract import CalibratedChange, ChangedWeight, knob
from playground.errors import Refusal

GROUP = 4  # consecutive inputs, of which some are kept
PATIENCE, PROGRESS = 50, 1e-5  # iterations that must make this relative progress together, or they are the last
DAMPING = 1e-9  # of the equations of a group, as a share of their trace


class Factors(NamedTuple):
    """A core [out, in] between blocks of rows [J, b, b] and of columns [K, b, b] on the diagonals of two matrices."""

    rows: Tensor
    core: Tensor
    columns: Tensor

    @property
    def product(self) -> Tensor:
        """The matrix [out, in] that they stand for."""
        inner = torch.einsum("okb,kbc->okc", self.core.unflatten(1, self.columns.shape[:2]), self.columns).flatten(1)
        return torch.einsum("jab,jbi->jai", self.rows, inner.unflatten(0, self.rows.shape[:2])).flatten(0, 1)


class ARMOR(CalibratedChange):
    """Replace each matrix by a sparse core between two block-diagonal matrices, which undo much of what pruning costs.

    Of every 4 consecutive inputs of a row of the core some stay, 2 as GPUs compute them faster. It starts as pruning by
    magnitude times input does, with identities around it; then all three are improved in turn: a step of Adam on their
    numbers, and, in each pair of a block of rows and one of columns, the best choice and values of one group, solved
    exactly. The error is that of normalised weights, by the mean square of their inputs. The blocks are stored in 16
    bits and count: `block` times (out + in) numbers per matrix. The authors make 3000 iterations with blocks of 32; the
    best iterate is kept here, not the last. Liu et al. 2025, arXiv 2510.05528.
    """

    name, title, paper, sheet = "armor", "ARMOR", "2510.05528", "weights/maskllm-cast-armor"
    adjective, guarantee, needs = "factored by ARMOR", ("heuristic",), ("corpus",)

    kept: int = knob(2, 1, GROUP, step=1, help="inputs of every 4 that the core keeps; 4 changes nothing")
    block: int = knob(16, 4, 128, step=4, help="size of the blocks beside the core; it must divide both sizes of every "
                                               "matrix")
    iterations: int = knob(100, 0, 3000, step=50, help="at most, of improving the factors; 0: pruning alone")
    rate: float = knob(0.003, 0.00001, 0.1, help="step of Adam, on weights of unit norm per row")

    def changed(self, weight, inputs):
        if self.kept == GROUP:
            return ChangedWeight(weight, WHOLE)
        if any(size % self.block for size in weight.shape):
            raise Refusal(f"Blocks of {self.block} do not divide a matrix of {len(weight)} by {weight.shape[1]}: "
                          "choose another block.", "block")
        columns = weight.norm(dim=0, keepdim=True).clamp(min=1e-8)
        rows = (weight / columns).norm(dim=1, keepdim=True).clamp(min=1e-8)
        fit = ArmorFit(weight / columns / rows, inputs.square().mean(0), self)
        blocks = WHOLE * self.block * sum(weight.shape) / weight.numel()
        return ChangedWeight(fit.best() * columns * rows, pruned_bits(1 - self.kept / GROUP, f"{self.kept}:4") + blocks)


class ArmorFit:
    """The factors of one matrix [out, in] while they are improved. sizes [in]: mean squares of its inputs."""

    def __init__(self, weight: Tensor, sizes: Tensor, change: ARMOR):
        self.weight, self.sizes, self.change = weight, sizes, change
        self.choices = torch.tensor(list(combinations(range(GROUP), change.kept)), device=weight.device)
        self._chance = torch.Generator().manual_seed(0)
        eye = torch.eye(change.block, dtype=weight.dtype, device=weight.device)
        self.mask = ~outside_pattern(weight.square() * sizes, f"{change.kept}:{GROUP}")
        self.values = [eye.repeat(len(weight) // change.block, 1, 1), weight.clone(),
                        eye.repeat(weight.shape[1] // change.block, 1, 1)]

    @property
    def factors(self) -> Factors:
        rows, core, columns = self.values
        return Factors(rows, core * self.mask, columns)

    def loss(self, factors: Factors) -> Tensor:
        return ((factors.product - self.weight).square() * self.sizes).sum()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def best(self) -> Tensor:
        """The product [out, in] of the best factors that were found."""
        for value in self.values:
            value.requires_grad_()
        steps = torch.optim.Adam(self.values, lr=self.change.rate, eps=1e-12)
        best, product, losses = float("inf"), self.weight, []
        for number in range(self.change.iterations + 1):
            found = self.factors.product
            loss = ((found - self.weight).square() * self.sizes).sum()
            losses.append(min(best, float(loss.detach())))
            if losses[-1] < best:
                best, product = losses[-1], found.detach()
            if number == self.change.iterations or stuck(losses):
                break
            steps.zero_grad()
            loss.backward()
            steps.step()
            self.choose_groups()
        return product

    @torch.no_grad()
    def choose_groups(self) -> None:
        """In each pair of blocks, give one group of the core the choice and values with the least loss."""
        factors = self.factors
        left = (factors.product - self.weight) * self.sizes
        groups, row, first = self._picked(factors, left)
        pairs = tuple(torch.meshgrid(*map(torch.arange, groups.shape), indexing="ij"))
        width = self.change.block
        scale = factors.rows[pairs[0], :, row]  # [J, K, b], the column of each row of a group
        basis = factors.columns[pairs[1][..., None], first[..., None] + torch.arange(GROUP)]  # [J, K, 4, b]
        seen = basis * self.sizes.unflatten(0, (-1, width))[:, None]
        squares = seen @ basis.mT
        at = pairs[0] * width + row, pairs[1] * width + first
        places = at[0][..., None], at[1][..., None] + torch.arange(GROUP)
        length = scale.square().sum(-1)[..., None]
        pull = torch.einsum("jkb,jbkc,jkgc->jkg", scale, _tiles(left, width), basis)
        pull = pull - length * (squares @ factors.core[places][..., None])[..., 0]  # without the group itself
        chosen, values = self._solved(squares, pull / length)
        self.mask[places] = torch.zeros_like(pull, dtype=torch.bool).scatter_(-1, chosen, True)
        self.values[1][places] = torch.zeros_like(pull).scatter_(-1, chosen, values)

    def _picked(self, factors: Factors, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One group of each pair of blocks at random, by the size of the gradient of the loss: its number, its row and
        its first column within the pair, each [J, K].
        """
        back = factors._replace(rows=factors.rows.mT, core=left, columns=factors.columns.mT).product
        sizes = _tiles(back.abs(), self.change.block).transpose(1, 2).unflatten(-1, (-1, GROUP)).sum(-1).flatten(2)
        groups = torch.multinomial(sizes.flatten(0, 1).cpu() + 1e-30, 1, generator=self._chance).to(left.device)
        groups = groups.view(sizes.shape[:2])
        across = self.change.block // GROUP
        return groups, groups // across, groups % across * GROUP

    def _solved(self, squares: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        """The best choice [..., kept] of a group, and its values. They minimise x'Qx + 2x'p over all choices, for
        Q = squares [..., 4, 4] and p = pull [..., 4].
        """
        choices = self.choices
        own = squares[..., choices[:, :, None], choices[:, None]]
        trace = own.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        own = own + (DAMPING * trace + 1e-30) * torch.eye(own.shape[-1], dtype=own.dtype, device=own.device)
        values = -torch.linalg.solve(own, pull[..., choices])
        gain = -(values * pull[..., choices]).sum(-1)
        best = gain.argmax(-1)
        return choices[best], values.take_along_dim(best[..., None, None], -2)[..., 0, :]


def stuck(losses: list[float]) -> bool:
    """Whether the last iterations made next to no progress."""
    return len(losses) > PATIENCE and losses[-1] > (1 - PROGRESS) * losses[-1 - PATIENCE]


def _tiles(matrix: Tensor, width: int) -> Tensor:
    """A matrix [out, in] as blocks [J, b, K, b]."""
    return matrix.unflatten(1, (-1, width)).unflatten(0, (-1, width))
