"""KV caches in the number formats of llama.cpp and vLLM."""
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from playground.algorithms.kv_cache.float_rows import FloatRows
from playground.algorithms.kv_cache.quantization import LARGEST, group_size, pack_bits, unpack_bits
from playground.contract import Quantises, knob

BLOCK = 32  # numbers that share a scale in ggml's formats
BITS = {"q8_0": 8, "q4_1": 4, "q4_0": 4, "fp8_e4m3": 8}


class CacheType(Quantises):
    """Store keys and values in a number format that llama.cpp (`--cache-type-k`, `--cache-type-v`) or vLLM
    (`--kv-cache-dtype`) offers.

    The formats of ggml divide each key and value into blocks of 32 channels with a float16 scale: q8_0 and q4_0 are
    symmetric, q4_1 also stores the minimum. fp8_e4m3 rounds each number to 4 bits of exponent and 3 of mantissa, with
    scale 1, vLLM's default without calibration. Useful to find the smallest format with which a model still answers as
    with a full cache, before a server is started with it; keys usually need more bits than values. Blocks are smaller
    if 32 does not divide the head. Those tools quantise as they write; here a token is quantised after its commit, and
    the prompt is read before anything is quantised. Attention reads dequantised states, so this saves memory but no
    time. Formats: ggml, Gerganov 2023; Micikevicius et al. 2022, arXiv 2209.05433.
    """

    name, title, paper, sheet = "cache_type", "Cache types (q8_0, q4_0, fp8)", "2209.05433", "kv-cache/kv-baselines"
    guarantee = ("collapses",)

    format: str = knob("q8_0", choices=tuple(BITS), help="number format of keys, and of values unless they differ")
    value_format: str = knob(
        "same", choices=("same", *BITS, "exact"), help="number format of values; exact: not quantised"
    )
    recent: int = knob(0, 0, 1024, step=1, help="most recent tokens, held in full precision; 0 in llama.cpp and vLLM")

    def quantise_count(self, part, exact):
        return max(0, exact - self.recent) if self._format(part) != "exact" else 0

    def quantised_bits(self, part, full):
        of_part = self._format(part)
        scales = {"q4_1": 2, "fp8_e4m3": 0}.get(of_part, 1)
        return BITS[of_part] + 16 * scales / group_size(full.head, BLOCK) if of_part in BITS else full.bits

    def quantise(self, part, rows, packed):
        coded = encoded(rows, self._format(part))
        return packed.concat(coded) if packed else coded

    def _format(self, part):
        return self.format if part == "keys" or self.value_format == "same" else self.value_format


@dataclass(frozen=True)
class BlockRows:
    """Rows [heads, count, d] as codes in blocks of channels: low + scale * (code - zero)."""

    dtype: torch.dtype  # of the rows
    bits: int
    zero: int  # code of the number 0, in symmetric formats
    codes: Tensor  # uint8, [heads, count, bytes of a row]
    scales: Tensor  # float16, [heads, count, blocks, 1]; with a second entry `low` in q4_1
    size: int  # channels per block

    @property
    def count(self) -> int:
        return self.codes.shape[1]

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def unpack(self, room: int = 0) -> Tensor:
        """The dequantised rows, [heads, count + room, d]; the last `room` of them are uninitialised."""
        d, scales = self.scales.shape[2] * self.size, self.scales.float()
        rows = torch.empty(len(self.codes), self.count + room, d, device=self.codes.device)
        packed = rows[:, :self.count]
        packed.copy_(unpack_bits(self.codes, self.bits, d))
        blocks = packed.unflatten(2, (-1, self.size))
        blocks.sub_(self.zero).mul_(scales[..., :1])
        if scales.shape[3] == 2:
            blocks.add_(scales[..., 1:])
        return rows.to(self.dtype)

    def concat(self, later: "BlockRows") -> "BlockRows":
        """These rows followed by later ones."""
        codes, scales = (torch.cat([getattr(self, n), getattr(later, n)], 1) for n in ("codes", "scales"))
        return replace(self, codes=codes, scales=scales)


def encoded(rows: Tensor, format: str) -> FloatRows | BlockRows:
    """Rows [heads, n, d] in a number format."""
    if format == "fp8_e4m3":
        return FloatRows.of(rows)
    wide = rows.float()
    size = group_size(rows.shape[2], BLOCK)
    codes, scales, zero = {"q8_0": q8_0, "q4_1": q4_1, "q4_0": q4_0}[format](wide.unflatten(2, (-1, size)))
    packed = pack_bits(codes.to(torch.uint8).flatten(2), BITS[format])
    return BlockRows(rows.dtype, BITS[format], zero, packed, scales.clamp(-LARGEST, LARGEST).half(), size)


def q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, int]:
    """Codes, scales and the code of 0: the largest magnitude of a block becomes 127; ties round away from 0."""
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    steps = blocks * inverse(scale)
    return steps.sign() * (steps.abs() + 0.5).floor() + 128, scale, 128


def q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, int]:
    """Codes, scales and the code of 0: the number of largest magnitude, with its sign, becomes -8 times the scale."""
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    return (blocks * inverse(scale) + 8.5).floor().clamp(0, 15), scale, 8


def q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, int]:
    """Codes, pairs of scale and minimum, and 0: the range of a block in 15 steps."""
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    return ((blocks - low) * inverse(scale) + 0.5).floor().clamp(0, 15), torch.cat([scale, low], -1), 0


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 for a block of equal numbers, whose scale is 0."""
    return torch.where(scale == 0, 0.0, 1 / scale)
