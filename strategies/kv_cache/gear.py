"""A quantised cache with its errors repaired."""
from dataclasses import dataclass

import torch
from torch import Tensor

from playground.algorithms.kv_cache.quantization import LARGEST, Quantised, fitting, quantise
from playground.contract import CachePolicy, knob
from playground.events import Figure

TINY = 1e-30  # stands for the length of rows that are all zero


class Gear(CachePolicy):
    """Hold old keys and values as few bits, a matrix of low rank that repairs what those got wrong, and a few numbers
    exactly.

    The largest and the smallest numbers are set aside, of a key's channel over the tokens of a block and of a token's
    values over all heads, and their mean takes their place, so that they do not stretch the scale. Then keys are
    quantised channel by channel and values token by token, and the error that is left of each head is approximated by a
    product of two thin matrices, found by power iteration. Tokens are packed a block at a time and never again; the
    prompt is read before anything is packed. Attention reads the unpacked rows, and every step unpacks them anew, so
    memory is saved and time is not. Without outliers and rank this is the quantised cache of KIVI with another
    schedule. The released simulation takes b * b - 1 steps for 2 ** b - 1 and sets aside too many keys in short blocks;
    neither is copied. Kang et al. 2024, arXiv 2403.05527.
    """

    name, title, paper, sheet = "gear", "Quantised and repaired (GEAR)", "2403.05527", "kv-cache/gear"
    guarantee = ("collapses",)
    row_wise, packs = False, True  # by the path: what a row reads in full depends on when the rows before it were kept

    bits: str = knob("2", choices=("1", "2", "4", "8"), help="bits of each number")
    group: int = knob(
        64, 8, 128, step=8, help="numbers that share a scale and a zero; fewer where that does not divide them"
    )
    outliers: float = knob(
        0.02, 0.0, 0.1, step=0.01, help="share of the numbers held exactly, half of them large and half small"
    )
    rank: int = knob(4, 0, 16, step=1, help="columns of the matrices that repair the prompt's block")
    later: int = knob(2, 0, 16, step=1, help="columns of those that repair later blocks")
    rounds: int = knob(3, 1, 8, step=1, help="rounds of power iteration that find them")
    buffer: int = knob(
        64, 8, 1024, step=8, help="tokens of a block; until there are so many they stay as they were written"
    )

    def __post_init__(self):
        self._sealed, self._blocks = {}, 0

    def retain(self, held):
        return held.live

    def due(self, part, exact):
        return exact - exact % self.buffer

    def packed_bits(self, part, full):
        """Of the prompt's block, beside which later ones are few."""
        tokens = self.due(part, full.prompt) or self.buffer
        grouped, vector = (tokens, tokens) if part == "keys" else (full.head, full.heads * full.head)
        aside = 2 * beyond(self.outliers, vector) / vector
        return (
            int(self.bits)
            + 32 / fitting(grouped, self.group)
            + aside * (full.bits + 16)
            + 16 * self.rank * (1 / tokens + 1 / full.head)
        )

    def encode(self, part, rows, packed):
        before = packed.blocks if packed else []
        pieces = rows.split(self.buffer, 1) if before else [rows]
        return Blocks([*before, *(self._block(part, piece, self.later if before else self.rank) for piece in pieces)])

    def _block(self, part, rows, rank):
        aside = set_aside(part, rows, self.outliers)
        coded = self._quantised(part, aside.replaced(rows))
        left = rows - aside.put_back(coded.unpack())
        block = Block(coded, aside, low_rank(left, rank, self.rounds))
        self._note(part, rows, [rows - self._quantised(part, rows).unpack(), left, rows - block.unpack()], block)
        return block

    def _quantised(self, part, rows):
        axis = 1 if part == "keys" else 2
        return quantise(rows, int(self.bits), axis, fitting(rows.shape[axis], self.group))

    def _note(self, part, rows, errors, block):
        whole = max(float(rows.float().norm()), TINY)
        sizes = [float(error.float().norm()) / whole for error in errors]
        self._sealed.setdefault(part, []).append([*sizes, 8 * block.bytes / rows.numel()])

    def explain(self, prompt, layers):
        self._blocks += bool(self._sealed)
        for part, sealed in self._sealed.items():
            bare, kept, repaired, bits = (sum(column) / len(column) for column in zip(*sealed))
            series = {"quantised alone": bare, "outliers kept": kept, "and repaired": repaired}
            yield Figure(
                "scalar", f"error of {part} in a block", {"x": self._blocks - 1, "axis": "block", "series": series}
            )
            yield Figure(
                "scalar",
                f"bits for each number of {part}",
                {"x": self._blocks - 1, "axis": "block", "series": {"all told": bits}},
            )
        self._sealed = {}


@dataclass(frozen=True)
class Outliers:
    """Numbers that are held exactly, by the vector they come from: a channel of keys [heads, d, n], or all values of a
    token [n, heads * d].
    """

    part: str
    numbers: Tensor  # [..., held]
    places: Tensor  # within the vector

    def replaced(self, rows: Tensor) -> Tensor:
        """Rows [heads, n, d] with the mean of its vector in place of each of them."""
        vectors = in_vectors(self.part, rows)
        return in_rows(
            self.part,
            vectors.scatter(-1, self.places.long(), vectors.mean(-1, keepdim=True).expand(self.places.shape)),
            rows,
        )

    def put_back(self, rows: Tensor) -> Tensor:
        """Rows [heads, n, d] with these numbers written into them."""
        places = self.places.long()
        if self.part == "keys":
            rows.mT.scatter_(-1, places, self.numbers)
        else:
            _, count, d = rows.shape
            tokens = torch.arange(0, len(places) * d, d, device=places.device)[:, None]
            # one place in all rows, for three indices take twice as long
            whole = places + places // d * (count - 1) * d + tokens
            rows.view(-1).scatter_(0, whole.flatten(), self.numbers.flatten())
        return rows


@dataclass(frozen=True)
class Block:
    """Tokens that were packed together."""

    coded: Quantised
    aside: Outliers
    factors: tuple[Tensor, Tensor]  # float16 [heads, n, rank] and [heads, d, rank]

    @property
    def bytes(self) -> int:
        return self.coded.bytes + sum(held.nbytes for held in (self.aside.numbers, self.aside.places, *self.factors))

    def unpack(self, room: int = 0) -> Tensor:
        """The rows, [heads, n + room, d], the last ones left open."""
        rows = self.aside.put_back(self.coded.unpack(room))
        wide = torch.promote_types(rows.dtype, torch.float32)
        left, right = (factor.to(wide) for factor in self.factors)
        repaired = rows.to(wide)
        repaired[:, :self.coded.count].baddbmm_(left, right.mT)
        return repaired.to(rows.dtype)


@dataclass(frozen=True)
class Blocks:
    """All that is packed, oldest first."""

    blocks: list[Block]

    @property
    def count(self) -> int:
        return sum(block.coded.count for block in self.blocks)

    @property
    def bytes(self) -> int:
        return sum(block.bytes for block in self.blocks)

    def unpack(self, room: int = 0) -> Tensor:
        """The rows of all blocks, [heads, n + room, d], in the memory of the first, which holds the prompt."""
        first, *behind = self.blocks
        rows, at = first.unpack(self.count - first.coded.count + room), first.coded.count
        for block in behind:
            rows[:, at:at + block.coded.count] = block.unpack()
            at += block.coded.count
        return rows


def in_vectors(part: str, rows: Tensor) -> Tensor:
    """Rows [heads, n, d] by the vectors among which outliers are sought: [heads, d, n] of keys, [n, heads * d] of
    values.
    """
    return rows.mT if part == "keys" else rows.transpose(0, 1).flatten(1)


def in_rows(part: str, vectors: Tensor, like: Tensor) -> Tensor:
    """The way back to rows [heads, n, d]."""
    return vectors.mT if part == "keys" else vectors.unflatten(1, (len(like), -1)).transpose(0, 1)


def beyond(share: float, length: int) -> int:
    """How many numbers are set aside at each end of a vector."""
    return int(share * length / 2 + 1e-9)


def set_aside(part: str, rows: Tensor, share: float) -> Outliers:
    """A share of the numbers of every vector, one half from its lower end and one from its upper."""
    vectors = in_vectors(part, rows)
    length = vectors.shape[-1]
    count, small = beyond(share, length), length < 2 ** 15
    rising = vectors.argsort(dim=-1, stable=True)
    places = torch.cat([rising[..., :count], rising[..., length - count:]], -1)
    return Outliers(part, vectors.gather(-1, places), places.to(torch.int16 if small else torch.int32))


def low_rank(left: Tensor, rank: int, rounds: int) -> tuple[Tensor, Tensor]:
    """Factors [heads, n, rank] and [heads, d, rank] of half precision, whose product is near to `left` [heads, n, d].

    Power iteration from a basis that is always the same, made orthonormal in every round: the space it ends in would be
    the same if only the last one did so, but small numbers would not survive.
    """
    wide = left.to(torch.promote_types(left.dtype, torch.float32))
    rank, chance = min(rank, *left.shape[1:]), torch.Generator().manual_seed(0)
    basis = torch.randn(len(left), left.shape[2], rank, generator=chance).to(wide)
    for _ in range(rounds if rank else 0):
        found = torch.linalg.qr(wide @ torch.linalg.qr(basis).Q).Q
        basis = wide.mT @ found
    found = found if rank else wide[..., :0]
    return found.to(torch.float16), basis.clamp(-LARGEST, LARGEST).to(torch.float16)
