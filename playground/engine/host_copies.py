"""Numbers between host and device, with as few waits as possible: a GPU runs empty while the host waits for it."""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


def on_device(numbers: list[Any], device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the host's numbers on a device. Copies to a CUDA device are not waited for."""
    return moved(torch.tensor(numbers, dtype=dtype), device)


def index_on(numbers: Sequence[int], device: torch.device | str) -> Tensor:
    """An index [n] on a device. All layers of a forward ask for the same ones, so the latest are kept: change none."""
    return _index_on(tuple(numbers), device)


@lru_cache(maxsize=256)
def _index_on(numbers: tuple[int, ...], device: torch.device | str) -> Tensor:
    with torch.inference_mode(False):
        return on_device(list(numbers), device, torch.long)


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device. Copies to a CUDA device are not waited for."""
    if torch.device(device).type != "cuda" or not tensor.is_cpu:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def read_lists(*parts: Tensor) -> list[list]:
    """`tolist()` of tensors on one device, of any shapes and types, in one transfer. Integers must be below 2^24."""
    if parts[0].is_cpu:
        return [part.tolist() for part in parts]
    wide = torch.float32 if parts[0].device.type == "mps" else torch.float64
    joined = torch.cat([part.flatten().to(wide) for part in parts]).cpu()
    split = joined.split([part.numel() for part in parts])
    return [numbers.view(part.shape).to(part.dtype).tolist() for numbers, part in zip(split, parts)]


def read_together(*parts: Tensor) -> list[list[list[float]]]:
    """The numbers of tensors [n, k], each with its own k: for each of the n rows the columns of every part.

    They are read in one transfer, as the type of the first. Integers must be below 2^24.
    """
    widths = [part.shape[1] for part in parts]
    joined = torch.cat([part.to(parts[0].dtype) for part in parts], 1).tolist()
    ends = list(accumulate(widths))
    return [[row[end - width:end] for width, end in zip(widths, ends)] for row in joined]
