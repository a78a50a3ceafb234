"""Eviction by how large keys and values are beside those of their neighbours."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.topk_eviction import TopKEviction
from playground.contract import DecidesByHead, knob

PARTS = {"keys": ("keys",), "values": ("values",), "product": ("keys", "values"), "mean": ("keys", "values")}


class Cur(TopKEviction, DecidesByHead):
    """Keep the tokens whose keys and values are large for their neighbourhood: rows from which the others can be
    rebuilt best, as in a CUR decomposition.

    The squared norm stands for the leverage of a row. Keys and values each count by their share of the norms within
    their window of the text, so that no part of it is emptied; the score is the product of both shares. The first
    tokens always stay. Nothing of the attention is read. Windows are cut by position, also where tokens in between are
    gone already, which a compression of the prompt alone never meets. Formulas of NVIDIA's kvpress; Sengupta et al.
    2025, arXiv 2509.15038.
    """

    name, title, paper, sheet = "cur", "By size beside neighbours (CurDKV)", "2509.15038", "kv-cache/kvzap"
    new_in = "2026"

    sinks: int = knob(4, 0, 64, step=1, help="first tokens of the text, always retained")
    width: int = knob(16, 0, 512, step=1, help="tokens of a window; 0: sizes count as they are")
    leverage: str = knob("product", choices=tuple(PARTS), help="what counts: the share of keys, values, or of both")

    def scores(self, held):
        shares = [self._shares(held.read(part).square().sum(-1), held) for part in PARTS[self.leverage]]
        both = torch.stack(shares)
        found = both.prod(0) if self.leverage == "product" else both.mean(0)
        return found.masked_fill(held.positions < self.sinks, torch.inf)

    def _shares(self, sizes: Tensor, held) -> Tensor:
        """Each size [kv_heads, slots] as a share of those in its window, if there are windows."""
        sizes = sizes.masked_fill(~held.live, 0)
        if not self.width:
            return sizes
        windows = (held.positions.clamp(min=0) // self.width).expand_as(sizes)
        sums = sizes.new_zeros(len(sizes), int(windows.max()) + 1).scatter_add(1, windows, sizes)
        return sizes / sums.gather(1, windows).clamp(min=torch.finfo(sizes.dtype).tiny)
