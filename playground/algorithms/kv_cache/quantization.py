"""Groupwise asymmetric quantisation of keys or values, with codes packed into bytes.

A number x of a group becomes the code round((x - zero) / scale), and is read back as zero + scale * code. Scale and
zero are float16, the zero rounded down and the scale rounded up, so the codes cover the range of the group and the
error is at most half of the stored scale. Numbers beyond the range of float16 are clamped to it.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST = torch.finfo(torch.float16).max
# rounding x to float16 changes it by at most half of |x| * SHARE + SMALLEST
SHARE, SMALLEST = 2.0 ** -10, 2.0 ** -24


@dataclass(frozen=True)
class Quantised:
    """Rows [heads, count, d] as codes.

    A group is `size` neighbours along `axis`: 1, tokens of one channel; 2, channels of one token.
    """

    bits: int
    axis: int
    size: int
    dtype: torch.dtype  # of the rows
    codes: Tensor  # uint8 [heads, count, bytes of a row]
    scale: Tensor  # float16, the shape of the rows with one entry for each group along `axis`
    zero: Tensor

    @property
    def count(self) -> int:
        return self.codes.shape[1]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scale, self.zero))

    def unpack(self, room: int = 0) -> Tensor:
        """The dequantised rows, [heads, count + room, d]; the last `room` of them are uninitialised."""
        wide, members = torch.promote_types(self.dtype, torch.float32), self.axis + 1
        scale, zero = (part.to(wide).unsqueeze(members) for part in (self.scale, self.zero))
        codes = unpack_bits(self.codes, self.bits, self._channels)
        rows = torch.empty(len(codes), self.count + room, self._channels, dtype=wide, device=codes.device)
        packed, groups = rows[:, :self.count], (-1, self.size)
        packed.copy_(codes)
        packed.unflatten(self.axis, groups).mul_(scale).add_(zero)
        return rows.to(self.dtype)

    @property
    def _channels(self) -> int:
        """Numbers per row, d."""
        return self.scale.shape[2] * (self.size if self.axis == 2 else 1)

    def concat(self, later: Quantised) -> Quantised:
        """These rows followed by later ones."""
        joined = {
            name: torch.cat([getattr(self, name), getattr(later, name)], 1) for name in ("codes", "scale", "zero")
        }
        return replace(self, **joined)


def quantise(rows: Tensor, bits: int, axis: int, size: int) -> Quantised:
    """Quantise rows [heads, n, d] to 1, 2, 4 or 8 bits; `size` must divide their length along `axis`."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    groups, members = wide.unflatten(axis, (-1, size)), axis + 1
    low, high = groups.amin(members), groups.amax(members)
    levels = 2 ** bits - 1
    zero = _half(low, -1)
    scale = _half((high - zero) / levels, 1)
    steps = (groups - zero.unsqueeze(members)) / scale.to(wide.dtype).unsqueeze(members)
    codes = steps.round().clamp(0, levels).to(torch.uint8).flatten(axis, members)
    return Quantised(bits, axis, size, rows.dtype, pack_bits(codes, bits), scale, zero)


def _half(x: Tensor, direction: int) -> Tensor:
    """x in float16, rounded up (1) or down (-1).

    Rounding up a number of 0 or more never gives 0, so that the result is a valid divisor.
    """
    return (x + direction * (x.abs() * SHARE + SMALLEST)).clamp(-LARGEST, LARGEST).to(torch.float16)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., n] below 2 ** bits, 8 / bits per byte, as uint8 [..., bytes]; the last byte is zero-padded."""
    share = 8 // bits
    filled = pad(codes, (0, -codes.shape[-1] % share)).unflatten(-1, (-1, share))
    return (filled << _shifts(bits, codes.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row, uint8 [..., count].

    Each decode step unpacks the whole cache, so all codes of a byte come from one table lookup.
    """
    # `take` is three times as slow as `index_select`
    codes = _codes_of_bytes(bits, packed.device).index_select(0, packed.flatten().int())
    return codes.view(packed.shape).view(torch.uint8)[..., :count]


@cache
def _codes_of_bytes(bits: int, device: torch.device) -> Tensor:
    """Lookup table [256] from a byte to its codes, as one integer with one byte per code."""
    codes = (torch.arange(256, dtype=torch.uint8)[:, None] >> _shifts(bits, torch.device("cpu"))) & (2 ** bits - 1)
    return codes.view({1: torch.int64, 2: torch.int32, 4: torch.int16, 8: torch.uint8}[bits])[:, 0].to(device)


@cache
def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def group_size(whole: int, wanted: int) -> int:
    """The largest group size up to `wanted` that divides `whole`."""
    return next(size for size in range(min(whole, wanted), 0, -1) if whole % size == 0)
