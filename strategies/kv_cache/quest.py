"""Quest: each row reads the pages of the cache that its query may attend to most."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from playground.contract import SelectsByStates, knob
from playground.engine.sampling import REMOVED
from playground.events import Figure


class Ranges(NamedTuple):
    """Smallest and largest number of each channel of the keys of pages, [kv_heads, pages, d]."""

    low: Tensor
    high: Tensor

    @classmethod
    def none(cls, keys: Tensor) -> Ranges:
        """Of no page, for keys like these [kv_heads, m, d]."""
        return cls(keys[:, :0], keys[:, :0])

    @property
    def pages(self) -> int:
        return self.low.shape[1]

    def first(self, count: int) -> Ranges:
        """Those of the first `count` pages, at most."""
        return Ranges(self.low[:, :count], self.high[:, :count])

    def followed_by(self, later: Ranges) -> Ranges:
        return Ranges(*(torch.cat(parts, 1) for parts in zip(self, later)))


class Quest(SelectsByStates):
    """Keep the full cache, but let each row read only the pages whose keys could match its query best.

    A page is `page` neighbouring tokens. Its bound is the largest product that a key within the smallest and largest
    number of each channel of the page could have with the query: the sum over channels of the larger of the two
    products. The pages with the largest bounds are read, `size` tokens of them, and always the row's own, newest page.
    The first layers read everything, as their attention is spread. This saves the reading of the cache, which decides
    the time of long texts on a GPU, and no memory: the ranges of complete pages are kept beside it, two rows for every
    `page`, and only keys and values of pages that are read are loaded. Each row selects by itself, so draft tokens are
    verified as plain decoding would; rows of one forward load the pages of all of them. The bounds of the query heads
    that share a KV head are added up; the authors' models share none. The prompt is read in full. A size for the whole
    text is the full cache. Tang et al. 2024, arXiv 2406.10774.
    """

    name, title, paper, sheet = "quest", "Query-aware pages (Quest)", "2406.10774", "kv-cache/quest"
    guarantee = ("collapses",)

    size: int = knob(64, 1, 2048, step=1, help="tokens that a row reads, in whole pages, its own page included")
    page: int = knob(16, 1, 64, step=1, help="tokens of a page")
    full_layers: int = knob(2, 0, 8, step=1, help="first layers, which read everything")

    def __post_init__(self):
        self._shares: dict[int, dict[str, Tensor]] = {}  # of the tokens that were read, by position and layer
        self._ranges: dict[int, Ranges] = {}  # of complete pages of committed tokens, by layer

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"size": tokens, "page": max(1, min(cls.page, tokens // 4))}

    def select_by_states(self, layer, query_states, key_states, around):
        heads, visible = len(key_states), around.visible.expand(len(key_states), -1, -1)
        if layer < self.full_layers:
            return torch.ones_like(visible)
        pages = (around.slots.clamp(min=0) // self.page).expand(heads, -1)
        known = self._known(layer, key_states, around)
        seen = [
            self._row(query_states[:, :, row], key_states, visible[:, row], pages, position // self.page, known)
            for row, position in enumerate(around.rows)
        ]
        self._note(layer, around, seen)
        return torch.stack(seen, 1)

    def _known(self, layer: int, keys: Tensor, around) -> Ranges:
        """The ranges of the complete pages of committed tokens, none if some of these are not visible to some row.

        Each page's keys are read once; pages of tokens that were taken back are forgotten.
        """
        count = around.committed // self.page if bool(around.visible[..., :around.committed].all()) else 0
        before = self._ranges.get(layer, Ranges.none(keys)).first(count)
        start = before.pages * self.page
        fresh = keys[:, start:count * self.page].unflatten(1, (-1, self.page)) if count > before.pages else None
        known = before if fresh is None else before.followed_by(Ranges(fresh.amin(2), fresh.amax(2)))
        if count:
            self._ranges[layer] = known
        return known

    def _row(self, query: Tensor, keys: Tensor, visible: Tensor, pages: Tensor, own: int, known: Ranges) -> Tensor:
        """What one row reads, bool [kv_heads, m], by its query states [kv_heads, group, d]."""
        known = known.first(own)  # without its own page
        rest = slice(known.pages * self.page, None)
        later = page_ranges(keys[:, rest], pages[:, rest] - known.pages, visible[:, rest], own + 1 - known.pages)
        low, high = known.followed_by(Ranges(*later))
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
