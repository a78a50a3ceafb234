"""Mustafar: unstructured sparsity of the KV cache."""
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from playground.algorithms.kv_cache.quantization import pack_bits, unpack_bits
from playground.contract import Quantises, knob
from playground.events import Figure

TINY = 1e-30  # in place of the norm of a row that is all zero


class Mustafar(Quantises):
    """Prune the numbers of smallest magnitude from every old key and value, and store the others with a bitmap.

    Pruning is per head and token, keys after the rotary embedding, and covers all but the last `window` tokens. A token
    is pruned once, when it leaves the window, without rescaling. The prompt is read before anything is pruned. All keys
    keep the same number of entries, and so do all values, so the remaining entries form a dense block beside the
    bitmap, and the size shown is the actual one. Attention reads dense states with zeros filled in, so this saves
    memory but no time. The authors' kernels work in tiles of 64 with padding that is not needed here. With `released`
    the number at the threshold is kept as well. Joo et al. 2025, arXiv 2505.22913.
    """

    name, title, paper, sheet = "mustafar", "Unstructured sparsity (Mustafar)", "2505.22913", "kv-cache/mustafar"
    guarantee = ("collapses",)

    key_zeros: float = knob(
        0.7, 0.0, 0.95, step=0.05, help="share of the numbers of a key that are pruned; 0: none"
    )
    value_zeros: float = knob(
        0.7, 0.0, 0.95, step=0.05, help="share of the numbers of a value that are pruned; 0: none"
    )
    window: int = knob(32, 0, 1024, step=1, help="most recent tokens, which are not pruned")
    counting: str = knob(
        "exact",
        choices=("exact", "released"),
        help="prune exactly the share, or one number less per row as in the released code",
    )

    def __post_init__(self):
        self._place, self._norms = 0, {}  # of rows pruned and whole, [heads, n], per layer

    def retain(self, held):
        self._place = held.next - held.prompt
        return held.live

    def quantise_count(self, part, exact):
        return max(0, exact - self.window)

    def quantise(self, part, rows, packed):
        pruned = sparse(rows, self.zeros(part, rows.shape[2]))
        self._norms.setdefault(part, []).append((pruned.numbers.float().norm(dim=-1), rows.float().norm(dim=-1)))
        return packed.concat(pruned) if packed else pruned

    def quantised_bits(self, part, full):
        return (1 - self.zeros(part, full.head) / full.head) * full.bits + 1

    def zeros(self, part, d):
        """Number of pruned entries among d."""
        rank = math.floor((self.key_zeros if part == "keys" else self.value_zeros) * d + 1e-9)
        return rank if self.counting == "exact" else max(0, rank - 1)

    def explain(self, prompt, layers):
        if self._norms:
            remaining = {part: mean_remaining(norms) for part, norms in self._norms.items()}
            yield Figure("scalar", "norm of pruned rows, relative", {"x": self._place, "series": remaining})
        self._norms = {}


def mean_remaining(norms):
    """Mean ratio of the norms of pruned rows to those of whole rows, from pairs [heads, n] per layer."""
    first = norms[0][0].device  # layers may be on several devices
    pruned, whole = (torch.cat([layer.to(first) for layer in each], 1) for each in zip(*norms))
    return float((pruned / whole.clamp(min=TINY)).mean())


@dataclass(frozen=True)
class Sparse:
    """Rows [heads, count, d] with equally many nonzero numbers each."""

    d: int
    places: Tensor  # bitmap of the nonzero numbers, uint8 [heads, count, bytes per row]
    numbers: Tensor  # [heads, count, nonzero]

    @property
    def count(self) -> int:
        return self.places.shape[1]

    @property
    def bytes(self) -> int:
        return self.places.nbytes + self.numbers.nbytes

    def unpack(self, room: int = 0) -> Tensor:
        """The dense rows, [heads, count + room, d], with zeros for pruned numbers."""
        mask = unpack_bits(pad(self.places, (0, 0, 0, room)), 1, self.d).view(torch.bool)
        rows = self.numbers.new_zeros(mask.shape)
        rows.view(-1).scatter_(0, where(mask.flatten()), self.numbers.flatten())
        return rows

    def concat(self, later: "Sparse") -> "Sparse":
        """These rows followed by later ones."""
        return replace(
            self, places=torch.cat([self.places, later.places], 1), numbers=torch.cat([self.numbers, later.numbers], 1)
        )


def where(mask: Tensor) -> Tensor:
    """Indices of the nonzero entries of a mask [n]; by numpy on a CPU, where it takes an eighth of torch's time."""
    return torch.from_numpy(mask.numpy().nonzero()[0]) if mask.device.type == "cpu" else mask.nonzero()[:, 0]


def sparse(rows: Tensor, zeros: int) -> Sparse:
    """Prune the `zeros` numbers of smallest magnitude from each row [heads, n, d]; on a tie the lower channels."""
    kept = rows.abs().argsort(dim=-1, stable=True)[..., zeros:]
    places = kept.sort(-1).values
    bits = torch.zeros_like(rows, dtype=torch.uint8).scatter(-1, places, 1)
    return Sparse(rows.shape[2], pack_bits(bits, 1), rows.gather(-1, places))
