"""GEAR: a quantised cache with a low-rank correction of its error."""
from dataclasses import dataclass

import torch
from torch import Tensor

from playground.algorithms.kv_cache.quantization import LARGEST, Quantised, group_size, quantise
from playground.contract import Quantises, knob
from playground.events import Figure

TINY = 1e-30  # in place of the norm of rows that are all zero


class Gear(Quantises):
    """Quantise old keys and values to few bits, correct the error by a low-rank matrix, and store outliers exactly.

    The largest and smallest numbers of each vector are stored exactly and replaced by the mean of the vector, so that
    they do not widen the quantisation range. Vectors are a channel of keys over the tokens of a block, and the values
    of a token over all heads. Then keys are quantised per channel and values per token, and the remaining error of each
    head is approximated by a product of two thin matrices, found by power iteration. Tokens are quantised once, a block
    at a time; the prompt is read before anything is quantised. Every step dequantises the cache for attention, so this
    saves memory but no time. Without outliers and with rank 0 this is the quantised cache of KIVI with a different
    schedule. The released simulation uses b * b - 1 levels in place of 2 ** b - 1 and stores too many outliers of keys
    in short blocks; neither is reproduced. Kang et al. 2024, arXiv 2403.05527.
    """

    name, title, paper, sheet = "gear", "Quantised and repaired (GEAR)", "2403.05527", "kv-cache/gear"
    guarantee = ("collapses",)

    bits: str = knob("2", choices=("1", "2", "4", "8"), help="bits per number")
    group: int = knob(
        64, 8, 128, step=8, help="numbers that share a scale and a zero; fewer if the group does not divide them"
    )
    outliers: float = knob(
        0.02, 0.0, 0.1, step=0.01, help="share of the numbers stored exactly: half the largest, half the smallest"
    )
    rank: int = knob(4, 0, 16, step=1, help="rank of the correction of the prompt's block")
    later: int = knob(2, 0, 16, step=1, help="rank of the correction of later blocks")
    rounds: int = knob(3, 1, 8, step=1, help="rounds of power iteration")
    buffer: int = knob(
        64, 8, 1024, step=8, help="tokens per block; an incomplete block is held in full precision"
    )

    def __post_init__(self):
        self._sizes, self._blocks = {}, 0  # relative errors and bits of new blocks, by part

    def quantise_count(self, part, exact):
        return exact - exact % self.buffer

    def quantised_bits(self, part, full):
        """Bits of the prompt's block, which dominates later ones."""
        tokens = self.quantise_count(part, full.prompt) or self.buffer
        grouped, vector = (tokens, tokens) if part == "keys" else (full.head, full.heads * full.head)
        outliers = 2 * outliers_per_end(self.outliers, vector) / vector
        return (
            int(self.bits)
            + 32 / group_size(grouped, self.group)
            + outliers * (full.bits + 16)
            + 16 * self.rank * (1 / tokens + 1 / full.head)
        )

    def quantise(self, part, rows, packed):
        before = packed.blocks if packed else []
        pieces = rows.split(self.buffer, 1) if before else [rows]
        return Blocks([*before, *(self._block(part, piece, self.later if before else self.rank) for piece in pieces)])

    def _block(self, part, rows, rank):
        outliers = find_outliers(part, rows, self.outliers)
        codes = self._quantised(part, outliers.replaced(rows))
        error = rows - outliers.restore(codes.unpack())
        block = Block(codes, outliers, low_rank(error, rank, self.rounds))
        self._note(part, rows, [rows - self._quantised(part, rows).unpack(), error, rows - block.unpack()], block)
        return block

    def _quantised(self, part, rows):
        axis = 1 if part == "keys" else 2
        return quantise(rows, int(self.bits), axis, group_size(rows.shape[axis], self.group))

    def _note(self, part, rows, errors, block):
        norm = max(float(rows.float().norm()), TINY)
        sizes = [float(error.float().norm()) / norm for error in errors]
        self._sizes.setdefault(part, []).append([*sizes, 8 * block.bytes / rows.numel()])

    def explain(self, prompt, layers):
        self._blocks += bool(self._sizes)
        for part, sizes in self._sizes.items():
            quantised, with_outliers, corrected, bits = (sum(column) / len(column) for column in zip(*sizes))
            series = {"quantised": quantised, "with outliers": with_outliers, "with correction": corrected}
            at = {"x": self._blocks - 1, "axis": "block"}
            yield Figure("scalar", f"error of {part} in a block", {**at, "series": series})
            yield Figure("scalar", f"bits per number of {part}", {**at, "series": {"total": bits}})
        self._sizes = {}


@dataclass(frozen=True)
class Outliers:
    """Numbers stored exactly, by vector: a channel of keys [heads, d, n], or all values of a token [n, heads * d]."""

    part: str
    numbers: Tensor  # [..., outliers]
    places: Tensor  # indices within the vector

    def replaced(self, rows: Tensor) -> Tensor:
        """Rows [heads, n, d] with each outlier replaced by the mean of its vector."""
        vectors = in_vectors(self.part, rows)
        means = vectors.mean(-1, keepdim=True).expand(self.places.shape)
        return in_rows(self.part, vectors.scatter(-1, self.places.long(), means), rows)

    def restore(self, rows: Tensor) -> Tensor:
        """Write the outliers into rows [heads, n, d], in place."""
        places = self.places.long()
        if self.part == "keys":
            rows.mT.scatter_(-1, places, self.numbers)
        else:
            _, count, d = rows.shape
            tokens = torch.arange(0, len(places) * d, d, device=places.device)[:, None]
            # a flat index, since three index tensors take twice as long
            whole = places + places // d * (count - 1) * d + tokens
            rows.view(-1).scatter_(0, whole.flatten(), self.numbers.flatten())
        return rows


@dataclass(frozen=True)
class Block:
    """Tokens that were quantised together."""

    codes: Quantised
    outliers: Outliers
    factors: tuple[Tensor, Tensor]  # float16 [heads, n, rank] and [heads, d, rank]

    @property
    def bytes(self) -> int:
        parts = (self.outliers.numbers, self.outliers.places, *self.factors)
        return self.codes.bytes + sum(part.nbytes for part in parts)

    def unpack(self, room: int = 0) -> Tensor:
        """The dequantised rows, [heads, n + room, d]; the last `room` of them are uninitialised."""
        rows = self.outliers.restore(self.codes.unpack(room))
        wide = torch.promote_types(rows.dtype, torch.float32)
        left, right = (factor.to(wide) for factor in self.factors)
        corrected = rows.to(wide)
        corrected[:, :self.codes.count].baddbmm_(left, right.mT)
        return corrected.to(rows.dtype)


@dataclass(frozen=True)
class Blocks:
    """All quantised blocks, oldest first."""

    blocks: list[Block]

    @property
    def count(self) -> int:
        return sum(block.codes.count for block in self.blocks)

    @property
    def bytes(self) -> int:
        return sum(block.bytes for block in self.blocks)

    def unpack(self, room: int = 0) -> Tensor:
        """The dequantised rows of all blocks, [heads, n + room, d], in one buffer."""
        first, *later = self.blocks
        rows, at = first.unpack(self.count - first.codes.count + room), first.codes.count
        for block in later:
            rows[:, at:at + block.codes.count] = block.unpack()
            at += block.codes.count
        return rows


def in_vectors(part: str, rows: Tensor) -> Tensor:
    """Rows [heads, n, d] as the vectors searched for outliers: [heads, d, n] for keys, [n, heads * d] for values."""
    return rows.mT if part == "keys" else rows.transpose(0, 1).flatten(1)


def in_rows(part: str, vectors: Tensor, like: Tensor) -> Tensor:
    """Inverse of `in_vectors`: rows [heads, n, d]."""
    return vectors.mT if part == "keys" else vectors.unflatten(1, (len(like), -1)).transpose(0, 1)


def outliers_per_end(share: float, length: int) -> int:
    """Number of outliers at each end of a vector."""
    return int(share * length / 2 + 1e-9)


def find_outliers(part: str, rows: Tensor, share: float) -> Outliers:
    """A share of the numbers of every vector, half of them the smallest and half the largest."""
    vectors = in_vectors(part, rows)
    length = vectors.shape[-1]
    count, small = outliers_per_end(share, length), length < 2 ** 15
    ascending = vectors.argsort(dim=-1, stable=True)
    places = torch.cat([ascending[..., :count], ascending[..., length - count:]], -1)
    return Outliers(part, vectors.gather(-1, places), places.to(torch.int16 if small else torch.int32))


def low_rank(error: Tensor, rank: int, rounds: int) -> tuple[Tensor, Tensor]:
    """float16 factors [heads, n, rank] and [heads, d, rank] whose product approximates `error` [heads, n, d].

    Power iteration from a fixed basis. Every round orthonormalises: in exact arithmetic it would suffice to do so in
    the last, but small singular values would be lost to rounding.
    """
    wide = error.to(torch.promote_types(error.dtype, torch.float32))
    rank, generator = min(rank, *error.shape[1:]), torch.Generator().manual_seed(0)
    basis = torch.randn(len(error), error.shape[2], rank, generator=generator).to(wide)
    for _ in range(rounds if rank else 0):
        left = torch.linalg.qr(wide @ torch.linalg.qr(basis).Q).Q
        basis = wide.mT @ left
    left = left if rank else wide[..., :0]
    return left.to(torch.float16), basis.clamp(-LARGEST, LARGEST).to(torch.float16)
