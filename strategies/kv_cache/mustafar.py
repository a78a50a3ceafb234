"""No token goes, but most numbers of the old ones do."""
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from playground.algorithms.kv_cache.quantization import pack_bits, unpack_bits
from playground.contract import CachePolicy, knob
from playground.events import Figure

TINY = 1e-30  # stands for the length of a row that is all zero


class Mustafar(CachePolicy):
    """Set the smallest numbers of every old key and value to zero, and hold only the others and a bit for each place.

    In each head and token by itself, keys as they are rotated, all but the last `window` tokens; a token is pruned
    once, when it leaves the window, and nothing is scaled to make up for it. The prompt is read before anything is
    pruned. Every row of a part keeps as many numbers, so they lie in one block next to a bitmap, and the bytes shown
    are those held; attention reads rows filled up with zeros, so memory is saved and time is not. The authors' kernels
    work in tiles of 64 with a padding that is not needed here. As released, the number on the threshold is kept
    besides. Joo et al. 2025, arXiv 2505.22913.
    """

    name, title, paper, sheet = "mustafar", "Unstructured sparsity (Mustafar)", "2505.22913", "kv-cache/mustafar"
    guarantee = ("collapses",)
    row_wise, packs = False, True  # by the path: what a row reads in full depends on when the rows before it were kept

    key_zeros: float = knob(
        0.7, 0.0, 0.95, step=0.05, help="share of the numbers of a key that become zero; 0 prunes none"
    )
    value_zeros: float = knob(
        0.7, 0.0, 0.95, step=0.05, help="share of the numbers of a value that become zero; 0 prunes none"
    )
    window: int = knob(32, 0, 1024, step=1, help="most recent tokens that stay whole")
    counting: str = knob(
        "exact",
        choices=("exact", "released"),
        help="whether the share is kept to, or one number more is held in each row",
    )

    def __post_init__(self):
        self._place, self._lengths = 0, {}  # those of rows pruned and whole, [heads, n], layer by layer

    def retain(self, held):
        self._place = held.next - held.prompt
        return held.live

    def due(self, part, exact):
        return max(0, exact - self.window)

    def encode(self, part, rows, packed):
        pruned = sparse(rows, self.zeros(part, rows.shape[2]))
        self._lengths.setdefault(part, []).append((pruned.numbers.float().norm(dim=-1), rows.float().norm(dim=-1)))
        return packed.then(pruned) if packed else pruned

    def packed_bits(self, part, full):
        return (1 - self.zeros(part, full.head) / full.head) * full.bits + 1

    def zeros(self, part, d):
        """How many of d numbers become zero."""
        rank = math.floor((self.key_zeros if part == "keys" else self.value_zeros) * d + 1e-9)
        return rank if self.counting == "exact" else max(0, rank - 1)

    def explain(self, prompt, layers):
        if self._lengths:
            kept = {part: kept_of(lengths) for part, lengths in self._lengths.items()}
            yield Figure("scalar", "length that pruned rows keep", {"x": self._place, "series": kept})
        self._lengths = {}


def kept_of(lengths):
    """Mean over layers, heads and rows of what is left of a length; lengths of rows pruned and whole, [heads, n], layer
    by layer.
    """
    pruned, whole = (torch.cat(each, 1) for each in zip(*lengths))
    return float((pruned / whole.clamp(min=TINY)).mean())


@dataclass(frozen=True)
class Sparse:
    """Rows [heads, count, d], as many numbers of each as the others."""

    d: int
    places: Tensor  # bits of the numbers that are held, uint8 [heads, count, bytes of a row]
    numbers: Tensor  # [heads, count, held]

    @property
    def count(self) -> int:
        return self.places.shape[1]

    @property
    def bytes(self) -> int:
        return self.places.nbytes + self.numbers.nbytes

    def unpack(self, room: int = 0) -> Tensor:
        """The rows, [heads, count + room, d], with zeros for what is not held."""
        held = unpack_bits(pad(self.places, (0, 0, 0, room)), 1, self.d).view(torch.bool)
        rows = self.numbers.new_zeros(held.shape)
        rows.view(-1).scatter_(0, where(held.flatten()), self.numbers.flatten())
        return rows

    def then(self, later: "Sparse") -> "Sparse":
        """These rows with later ones behind them."""
        return replace(
            self, places=torch.cat([self.places, later.places], 1), numbers=torch.cat([self.numbers, later.numbers], 1)
        )


def where(mask: Tensor) -> Tensor:
    """The places of a mask [n] that are set, [set]; by numpy on a processor, where it takes an eighth of the time, and
    every step asks for all.
    """
    return torch.from_numpy(mask.numpy().nonzero()[0]) if mask.device.type == "cpu" else mask.nonzero()[:, 0]


def sparse(rows: Tensor, zeros: int) -> Sparse:
    """Rows [heads, n, d] without the `zeros` smallest numbers of each; of equals those of the lower channels go."""
    falling = rows.abs().argsort(dim=-1, stable=True)[..., zeros:]
    places = falling.sort(-1).values
    bits = torch.zeros_like(rows, dtype=torch.uint8).scatter(-1, places, 1)
    return Sparse(rows.shape[2], pack_bits(bits, 1), rows.gather(-1, places))
