"""Quest: each row reads the pages of the cache that its query may attend to most."""
import torch
from torch import Tensor

from playground.contract import SelectsByStates, knob
from playground.engine.sampling import REMOVED
from playground.events import Figure


class Quest(SelectsByStates):
    """Keep the full cache, but let each row read only the pages whose keys could match its query best.

    A page is `page` neighbouring tokens. Its bound is the largest product that a key within the smallest and largest
    number of each channel of the page could have with the query: the sum over channels of the larger of the two
    products. The pages with the largest bounds are read, `size` tokens of them, and always the row's own, newest page.
    The first layers read everything, as their attention is spread. This saves the reading of the cache, which decides
    the time of long texts on a GPU, and no memory; here pages that are not read are masked, so no time is saved either.
    Each row selects by itself, so draft tokens are verified as plain decoding would. The bounds of the query heads that
    share a KV head are added up; the authors' models share none. The prompt is read in full. A size for the whole text
    is the full cache. Tang et al. 2024, arXiv 2406.10774.
    """

    name, title, paper, sheet = "quest", "Query-aware pages (Quest)", "2406.10774", "kv-cache/quest"
    guarantee = ("collapses",)

    size: int = knob(64, 1, 2048, step=1, help="tokens that a row reads, in whole pages, its own page included")
    page: int = knob(16, 1, 64, step=1, help="tokens of a page")
    full_layers: int = knob(2, 0, 8, step=1, help="first layers, which read everything")

    def __post_init__(self):
        self._shares: dict[int, dict[str, Tensor]] = {}  # of the tokens that were read, by position and layer

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"size": tokens, "page": max(1, min(cls.page, tokens // 4))}

    def select_by_states(self, layer, query_states, key_states, around):
        heads, visible = len(key_states), around.visible.expand(len(key_states), -1, -1)
        if layer < self.full_layers:
            return torch.ones_like(visible)
        pages = (around.slots.clamp(min=0) // self.page).expand(heads, -1)
        seen = [
            self._row(query_states[:, :, row], key_states, visible[:, row], pages, position // self.page)
            for row, position in enumerate(around.rows)
        ]
        self._note(layer, around, seen)
        return torch.stack(seen, 1)

    def _row(self, query: Tensor, keys: Tensor, visible: Tensor, pages: Tensor, own: int) -> Tensor:
        """What one row reads, bool [kv_heads, m], by its query states [kv_heads, group, d]."""
        low, high = page_ranges(keys, pages, visible, own + 1)
        bounds = page_bounds(query, low, high).sum(1)
        bounds = bounds.masked_fill(torch.isinf(low[..., 0]), REMOVED)  # a page without a visible token
        bounds[:, own] = -REMOVED
        best = bounds.topk(min(max(1, self.size // self.page), own + 1), -1).indices
        read = torch.zeros_like(bounds, dtype=torch.bool).scatter(1, best, True)
        return read.gather(1, pages.clamp(max=own))

    def _note(self, layer: int, around, seen: list[Tensor]) -> None:
        for row, position in enumerate(around.rows):
            visible = around.visible[:, row].expand_as(seen[row])
            share = (seen[row] & visible).sum() / visible.sum()
            self._shares.setdefault(position, {})[f"layer {layer}"] = share

    def explain(self, prompt, layers):
        committed = sorted(position for position in self._shares if position < self.text_length)
        for position in committed:
            shares = self._shares.pop(position)
            series = dict(zip(shares, torch.stack(list(shares.values())).tolist()))  # read once for all layers
            yield Figure("scalar", "share of the cache that is read", {"x": position + 1 - prompt, "series": series})


def page_ranges(keys: Tensor, pages: Tensor, visible: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest number of each channel of the visible keys of each page, [kv_heads, count, d].

    `keys` [kv_heads, m, d] lie in `pages` [kv_heads, m]; infinite for a page without a visible key.
    """
    index = pages.clamp(max=count - 1)[..., None].expand_as(keys)
    hidden = ~visible[..., None]
    shape = len(keys), count, keys.shape[2]
    low = keys.new_full(shape, -REMOVED).scatter_reduce(1, index, keys.masked_fill(hidden, -REMOVED), "amin")
    high = keys.new_full(shape, REMOVED).scatter_reduce(1, index, keys.masked_fill(hidden, REMOVED), "amax")
    return low, high


def page_bounds(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Largest product of a query [kv_heads, group, d] with any key within the ranges [kv_heads, pages, d] of a page.

    [kv_heads, group, pages].
    """
    low, high = (part.nan_to_num(0.0, 0.0, 0.0)[:, None] for part in (low, high))
    return torch.maximum(query[:, :, None] * low, query[:, :, None] * high).sum(-1)
