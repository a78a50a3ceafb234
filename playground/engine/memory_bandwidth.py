"""How fast a device reads its memory. To decode one token all weights are read once, so that bounds tokens a second."""
from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

SHAPE = 8192, 8192  # of the matrix: 268 MB in float32, more than the caches of most processors hold
ROUNDS = 5


@cache
def memory_bandwidth(device: str) -> float:
    """Bytes a second that a matrix-vector product reads on a device: the best of some products, which take 0.2 s on a
    laptop. Measured once in a process.
    """
    matrix = torch.ones(SHAPE, device=device)
    vector = torch.ones(SHAPE[1], device=device)
    return matrix.nbytes / min(_seconds(matrix, vector) for _ in range(ROUNDS))


def _seconds(matrix: torch.Tensor, vector: torch.Tensor) -> float:
    begun = perf_counter()
    (matrix @ vector)[0].item()  # reading a number waits for the device
    return perf_counter() - begun
