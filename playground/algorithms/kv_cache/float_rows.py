"""Rows of keys or values as 8-bit floating-point numbers, as vLLM stores them without calibration."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448; larger numbers saturate


@dataclass(frozen=True)
class FloatRows:
    """Rows [heads, count, d] as numbers with 4 bits of exponent and 3 of mantissa, with scale 1."""

    dtype: torch.dtype  # of the rows
    codes: Tensor  # uint8, [heads, count, d]

    @classmethod
    def of(cls, rows: Tensor) -> FloatRows:
        return cls(rows.dtype, rows.float().clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8))

    @property
    def count(self) -> int:
        return self.codes.shape[1]

    @property
    def bytes(self) -> int:
        return self.codes.nbytes

    def unpack(self, room: int = 0) -> Tensor:
        """The dequantised rows, [heads, count + room, d]; the last `room` of them are uninitialised."""
        heads, count, d = self.codes.shape
        rows = torch.empty(heads, count + room, d, dtype=self.dtype, device=self.codes.device)
        rows[:, :count] = self.codes.view(FP8).to(self.dtype)
        return rows

    def concat(self, later: FloatRows) -> FloatRows:
        """These rows followed by later ones."""
        return replace(self, codes=torch.cat([self.codes, later.codes], 1))
