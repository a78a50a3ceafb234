"""Muon: momentum with orthogonalised updates, for the weight matrices; everything else is trained by AdamW.

The update of a matrix is replaced by (approximately) its nearest orthogonal matrix, by five Newton-Schulz steps, so
that all directions learn at the same rate. Matrices of one shape are stacked and processed in one batch, since these
steps are the whole cost on a CPU.
Source: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
"""
import torch

from playground.pocket.training.precision import product_type

COEFFICIENTS = (3.4445, -4.7750, 2.0315)    # chosen by the authors for fast convergence towards singular values near 1


class Muon(torch.optim.Optimizer):
    """Optimiser for two-dimensional parameters."""

    def __init__(self, matrices, lr=0.02, momentum=0.95, weight_decay=0.05):
        super().__init__(matrices, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        """One update of every matrix from its gradient."""
        for group in self.param_groups:
            for matrices in _by_shape(group["params"]):
                updates = orthogonal(torch.stack([self._nesterov(p, group["momentum"]) for p in matrices]))
                _apply(matrices, updates, group)

    def _nesterov(self, matrix, momentum):
        """Nesterov momentum: the gradient, interpolated with its updated running mean."""
        state = self.state[matrix]
        if "mean" not in state:
            state["mean"] = torch.zeros_like(matrix)
        state["mean"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(state["mean"], momentum)


def orthogonal(stack, steps=5):
    """Approximate orthogonal factor of every matrix. stack: (n, rows, columns); returns the same shape in float32."""
    tall = stack.shape[1] > stack.shape[2]
    x = stack.transpose(1, 2) if tall else stack
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(product_type(x.device.type)).contiguous()
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(b * gram + c * torch.bmm(gram, gram), x)
    return (x.transpose(1, 2) if tall else x).float()


def _by_shape(parameters):
    groups = {}
    for p in parameters:
        if p.grad is not None:
            groups.setdefault(tuple(p.shape), []).append(p)
    return groups.values()


def _apply(matrices, updates, group):
    rows, columns = matrices[0].shape
    scale = group["lr"] * max(1, rows / columns) ** 0.5
    for matrix, update in zip(matrices, updates):
        matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)
