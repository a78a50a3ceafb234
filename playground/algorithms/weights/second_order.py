"""Changes weights column by column, each error being made up for by the columns that follow.

Of all ways to change the rest of a row after one weight is fixed, one keeps the layer's output on the calibration texts
closest: it follows the inverse of the Hessian X'X of the columns that are still free (optimal brain surgeon, Hassibi
and Stork 1993). All these inverses are rows of one Cholesky factor, as Frantar et al. 2022 found.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Settle = Callable[[int, Tensor, Tensor], Tensor]
"""From a column, the weights [out, in] as they are now, and the factor: the final values of the column, [out]."""


def compensated(weight: Tensor, inputs: Tensor, damping: float, settle: Settle) -> Tensor:
    """The weights [out, in] after every column was settled, for inputs [n, in].

    Columns whose input is always 0 become 0. damping: added to the diagonal of the Hessian, as a share of its mean.
    """
    factor, new = inverse_factor(inputs, damping), weight.clone()
    new[:, inputs.square().sum(0) == 0] = 0
    for at in range(weight.shape[1]):
        before = new[:, at].clone()
        new[:, at] = settle(at, new, factor)
        error = (before - new[:, at]) / factor[at, at]
        new[:, at + 1:] -= error[:, None] * factor[at, at + 1:]
    return new


def inverse_factor(inputs: Tensor, damping: float) -> Tensor:
    """Upper triangular U [in, in] with U'U the inverse of the damped Hessian of inputs [n, in].

    Row i from its diagonal on, times U[i, i], is the first row of the inverse for the columns from i on.
    """
    wide = inputs.double()
    hessian = wide.T @ wide
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1  # of inputs that never occur
    diagonal += damping * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True).to(inputs)
