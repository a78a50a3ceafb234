"""TurboQuant cache types: keys are rotated before they are rounded."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from playground.algorithms.kv_cache.float_rows import FloatRows
from playground.algorithms.kv_cache.quantization import LARGEST, pack_bits, unpack_bits
from playground.contract import Quantises, knob

# bits of a key's and of a value's number; 8: floating-point
FORMATS = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
ITERATIONS, POINTS, TOLERANCE = 200, 200, 1e-10  # of the search for centroids, as in vLLM
REACH = 3.5  # standard deviations up to which the first centroids lie; integrals go three times as far
SMALLEST, TINY = 1e-8, 1e-16  # least norm of a key and scale of a value; least squared norm of centroids


class TurboQuant(Quantises):
    """Store keys and values in one of the formats that vLLM calls turboquant (`--kv-cache-dtype turboquant_4bit_nc`).

    A key is divided by its norm, which takes two bytes, and multiplied with a Hadamard matrix. This spreads channels
    that are large in every token over all channels, whose numbers then look like a sample of one normal distribution:
    each becomes the nearest of 8 or 16 centroids that are best for that distribution, the same ones for every model. No
    scale by channel or group is needed, and a token is final as soon as it is written. When keys are read, the
    centroids of a key are scaled to its norm, which corrects what rounding did to it. Values are rounded to 8 or 16
    even steps from the token's least to its largest number. k8v4 has 8-bit floating-point keys in place of rotated
    ones. The first and last layers, which suffer most, stay as they are, as in vLLM.

    The paper's second stage, a sketch of the rounding error with one bit per number, is left out, as in vLLM. Where the
    number of channels is no power of two, the largest that divides it is rotated together. vLLM rotates queries where
    keys are rotated back here, and quantises as it writes; here a token is quantised after its commit, and the prompt
    is read before. Zandieh et al. 2025, arXiv 2504.19874.
    """

    name, title, paper, sheet = "turboquant", "Rotated cache types (TurboQuant)", "2504.19874", "kv-cache/kv-baselines"
    guarantee, new_in = ("collapses",), "2026"

    format: str = knob("4bit_nc", choices=tuple(FORMATS), help="bits of keys and values, named as in vLLM")
    whole: int = knob(2, 0, 64, step=1, help="first layers left as they are, and as many last ones; at most half")
    recent: int = knob(0, 0, 1024, step=1, help="most recent tokens, held in full precision; 0 in vLLM")

    def quantises_layer(self, layer, layers):
        whole = min(self.whole, layers // 2)
        return whole <= layer < layers - whole

    def quantise_count(self, part, exact):
        return max(0, exact - self.recent)

    def quantised_bits(self, part, full):
        bits = self._bits(part)
        if bits == 8:
            return 8
        extra = 16 if part == "keys" else 32  # norm; scale and least number
        return (8 * packed_bytes(full.head, bits) + extra) / full.head

    def quantise(self, part, rows, packed):
        bits = self._bits(part)
        if bits == 8:
            coded = FloatRows.of(rows)
        else:
            coded = RotatedRows.of(rows, bits) if part == "keys" else StepRows.of(rows, bits)
        return packed.concat(coded) if packed else coded

    def _bits(self, part: str) -> int:
        return FORMATS[self.format][part == "values"]


@dataclass(frozen=True)
class RotatedRows:
    """Rows [heads, count, d] as norms and the numbers of centroids in rotated directions."""

    dtype: torch.dtype  # of the rows
    bits: int
    channels: int
    codes: Tensor  # uint8, [heads, count, bytes of a row]
    norms: Tensor  # float16, [heads, count, 1]

    @classmethod
    def of(cls, rows: Tensor, bits: int) -> RotatedRows:
        wide, d = rows.float(), rows.shape[2]
        norms = wide.norm(dim=-1, keepdim=True)
        levels = centroids(d, bits).to(rows.device)
        codes = torch.bucketize(rotated(wide / (norms + SMALLEST)), (levels[1:] + levels[:-1]) / 2, right=True)
        return cls(rows.dtype, bits, d, packed(codes.to(torch.uint8), bits), norms.clamp(max=LARGEST).half())

    @property
    def count(self) -> int:
        return self.codes.shape[1]

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + self.norms.nbytes

    def unpack(self, room: int = 0) -> Tensor:
        """The dequantised rows, [heads, count + room, d]; the last `room` of them are uninitialised."""
        levels = centroids(self.channels, self.bits).to(self.codes.device)
        found = levels[unpacked(self.codes, self.bits, self.channels).int()]
        found = found * (found.square().sum(-1, keepdim=True) + TINY).rsqrt()
        return with_room(rotated(found * self.norms.float()), room, self.dtype)

    def concat(self, later: RotatedRows) -> RotatedRows:
        """These rows followed by later ones."""
        codes, norms = (torch.cat([getattr(self, name), getattr(later, name)], 1) for name in ("codes", "norms"))
        return replace(self, codes=codes, norms=norms)


@dataclass(frozen=True)
class StepRows:
    """Rows [heads, count, d] as steps from the least to the largest number of each row."""

    dtype: torch.dtype  # of the rows
    bits: int
    channels: int
    codes: Tensor  # uint8, [heads, count, bytes of a row]
    scales: Tensor  # float16, [heads, count, 2]: the size of a step, and the least number

    @classmethod
    def of(cls, rows: Tensor, bits: int) -> StepRows:
        wide = rows.float()
        low, high = wide.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).clamp(min=SMALLEST)
        codes = ((wide - low) / scale + 0.5).floor().clamp(0, 2**bits - 1).to(torch.uint8)
        scales = torch.cat([scale, low], -1).clamp(-LARGEST, LARGEST).half()
        return cls(rows.dtype, bits, rows.shape[2], packed(codes, bits), scales)

    @property
    def count(self) -> int:
        return self.codes.shape[1]

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def unpack(self, room: int = 0) -> Tensor:
        """The dequantised rows, [heads, count + room, d]; the last `room` of them are uninitialised."""
        scale, low = self.scales.float().split(1, -1)
        return with_room(unpacked(self.codes, self.bits, self.channels) * scale + low, room, self.dtype)

    def concat(self, later: StepRows) -> StepRows:
        """These rows followed by later ones."""
        codes, scales = (torch.cat([getattr(self, name), getattr(later, name)], 1) for name in ("codes", "scales"))
        return replace(self, codes=codes, scales=scales)


def with_room(rows: Tensor, room: int, dtype: torch.dtype) -> Tensor:
    """Rows [heads, n, d] followed by `room` uninitialised ones."""
    found = torch.empty(rows.shape[0], rows.shape[1] + room, rows.shape[2], dtype=dtype, device=rows.device)
    found[:, :rows.shape[1]] = rows
    return found


# --- rotation ---


def rotated(rows: Tensor) -> Tensor:
    """Rows [..., d] times an orthonormal Hadamard matrix, which is its own inverse."""
    size = rows.shape[-1] & -rows.shape[-1]  # the largest power of two that divides d
    return (rows.unflatten(-1, (-1, size)) @ hadamard(size, rows.device)).flatten(-2)


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """The orthonormal, symmetric matrix [size, size] of Sylvester's construction, for a power of two."""
    with torch.inference_mode(False):
        found = torch.ones(1, 1)
        while len(found) < size:
            found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
        return (found * size**-0.5).to(device)


# --- centroids ---


@cache
def centroids(d: int, bits: int) -> Tensor:
    """The 2 ** bits numbers that represent a normal distribution of variance 1 / d best, ascending, float32.

    Lloyd's iteration with vLLM's integrals, so that they are the engine's numbers to rounding.
    """
    with torch.inference_mode(False):
        count, deviation = 2**bits, d**-0.5
        reach = torch.tensor([REACH * deviation], dtype=torch.float64)
        found = reach * (2 * (torch.arange(count, dtype=torch.float64) + 0.5) / count - 1)
        for _ in range(ITERATIONS):
            edges = torch.cat([-3 * reach, (found[1:] + found[:-1]) / 2, 3 * reach])
            better = _means(edges, deviation)
            if float((better - found).abs().max()) < TOLERANCE:
                break
            found = better
        return found.float()


def _means(edges: Tensor, deviation: float) -> Tensor:
    """The means [n] of a centred normal distribution between consecutive edges [n + 1], by the trapezoidal rule."""
    steps = torch.linspace(0, 1, POINTS + 1, dtype=edges.dtype)
    at = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * steps
    density = (-at.square() / (2 * deviation**2)).exp() / (deviation * math.sqrt(2 * math.pi))
    return torch.trapezoid(at * density, dim=1) / torch.trapezoid(density, dim=1)


# --- codes of three bits ---


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of so many codes."""
    return 3 * -(-count // 8) if bits == 3 else -(-count * bits // 8)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] of 3 or 4 bits as uint8 [..., bytes]: eight of 3 bits take three bytes, as in vLLM."""
    if bits != 3:
        return pack_bits(codes, bits)
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8)).int()
    whole = (filled << torch.arange(0, 24, 3, dtype=torch.int32, device=codes.device)).sum(-1, keepdim=True)
    return (whole >> torch.arange(0, 24, 8, device=codes.device) & 255).to(torch.uint8).flatten(-2)


def unpacked(codes: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row, uint8 [..., count]."""
    if bits != 3:
        return unpack_bits(codes, bits, count)
    three = codes.unflatten(-1, (-1, 3)).int() << torch.arange(0, 24, 8, dtype=torch.int32, device=codes.device)
    found = three.sum(-1, keepdim=True) >> torch.arange(0, 24, 3, device=codes.device) & 7
    return found.to(torch.uint8).flatten(-2)[..., :count]
