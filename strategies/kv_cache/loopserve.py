"""Each stretch of the prompt picks the lines of attention that matter to it, and what was just written says what of the
cache still does.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import Lately, heaviest
from playground.contract import CachePolicy, knob
from playground.events import Figure

TINY = 1e-6  # of a row's attention, by which a cover may fall short: rounding


class LoopServe(CachePolicy):
    """Read the prompt along a few lines of its attention, then let the last tokens written choose, time and again, what
    the cache keeps.

    A sample of the rows of a new stretch is worked out in full. The columns (one token, seen by all) and the diagonals
    (one distance, seen by all) that carry the most of it are taken until `coverage` of it is covered, in each layer and
    KV head by itself, and all rows of the stretch attend along those lines alone. Every `period` tokens from then on
    each head keeps the `size` tokens that the last `period` rows attended to most, next to those rows. What is let go
    is gone, or, as a view, stays in the cache unseen and may come back when later rows turn to it: that shows the
    choice and saves nothing. Coverage 1 reads everything, and room for the whole text keeps everything.

    A reconstruction: only the paper's abstract could be read, so lines, the order in which they are taken (by the
    attention on them, ranked once) and all numbers are choices. Attention is worked out in full and then cut, which
    shows the share and saves no time; query heads of one group share their lines. A dialogue comes as one prompt, so
    its turns are not told apart: a stretch is what one forward reads, 128 tokens at most. Li et al. 2025, arXiv
    2507.13681.
    """

    name, title, paper, sheet = (
        "loopserve",
        "Lines of attention, then the latest rows (LoopServe)",
        "2507.13681",
        "kv-cache/loopserve",
    )
    guarantee = ("collapses",)
    reconstruction, sure = True, "low"
    row_wise, watches, focuses = False, True, True

    coverage: float = knob(
        0.95,
        0.5,
        1.0,
        step=0.01,
        help="share of the sampled attention that the lines of a stretch carry; 1 reads everything",
    )
    rows: int = knob(32, 1, 128, step=1, help="rows of a stretch that are sampled, the last one among them")
    size: int = knob(64, 1, 2048, step=1, help="tokens that stay before the latest rows")
    period: int = knob(16, 1, 64, step=1, help="tokens between two choices, and latest rows that make one")
    dropped: str = knob(
        "gone", choices=("gone", "view"), help="whether what is let go is freed, or hidden until it is wanted again"
    )

    def __post_init__(self):
        self.lately, self._read = Lately(self.period), {}
        # where a layer was last cut, and what a view of it shows; slots that left and came, by position
        self._cut, self._seen, self._turnover = {}, {}, {}

    @classmethod
    def holding(cls, tokens, prompt):
        period = min(cls.period, max(1, tokens // 4))
        return {"size": max(1, tokens - period), "period": period}

    def promise(self, full):
        return 1.0 if self.dropped == "view" else min(1.0, (self.size + 2 * self.period - 1) / full.length)

    # --- reading the prompt ---

    def chooses(self, position, prompt):
        return self.coverage < 1 if position < prompt else bool(self._seen)

    def focus(self, layer, weights, queries):
        return self._view(layer, weights) if layer in self._seen else self._lines(layer, weights, queries)

    def _lines(self, layer, weights, queries):
        cover = covering(weights, queries, sampled(len(queries), self.rows), self.coverage)
        self._read[layer] = self._read.get(layer, 0) + torch.stack(
            [cover.cells, cover.all_cells, cover.attention, cover.all_attention]
        )
        return cover.mask

    def _view(self, layer, weights):
        """What a view shows, and all that is younger than it, [kv_heads, n, slots]."""
        seen = self._seen[layer][:, :weights.shape[2]]
        young = seen.new_ones(len(weights), weights.shape[2] - seen.shape[1])
        return torch.cat([seen.expand(len(weights), -1), young], 1)[:, None].expand_as(weights)

    # --- writing ---

    def wants(self, position, prompt):
        return position >= prompt - self.period

    def attended(self, layer, weights, queries, keys):
        self.lately.add(layer, weights, keys)

    def retain(self, held):
        due = held.next >= max(held.prompt, self._cut.get(held.layer, held.prompt - self.period) + self.period)
        if not due:
            return held.live
        self._cut[held.layer] = held.next
        late = held.positions >= held.next - self.period
        stays = late | heaviest(self.lately.of(held.layer, held.positions), self.size, held.live & ~late)
        self._note(held, stays)
        if self.dropped == "gone":
            return stays
        self._seen[held.layer] = stays
        return held.live

    def _note(self, held, stays):
        before = self._seen.get(held.layer, held.live[:, :0])
        before = torch.cat([before, before.new_ones(len(before), stays.shape[1] - before.shape[1])], 1)
        tally = self._turnover.setdefault(held.next - held.prompt, {"let go": 0, "came back": 0})
        tally["let go"] += int((before & held.live & ~stays).sum())
        tally["came back"] += int((~before & stays).sum())

    def explain(self, prompt, layers):
        if self._read and self._cut:
            told = torch.stack([self._read[layer] for layer in sorted(self._read)], 1).tolist()
            yield _matrix("cells of the prompt's attention that were read", told[0], told[1])
            yield _matrix("attention of the sampled rows that they carry", told[2], told[3])
            self._read = {}
        for position, tally in self._turnover.items():
            yield Figure("scalar", "slots let go and slots that came back", {"x": position, "series": tally})
        self._turnover = {}


def _matrix(name: str, parts: list[list[float]], wholes: list[list[float]]) -> Figure:
    """Shares by layer and head."""
    values = [[part / whole for part, whole in zip(*layer)] for layer in zip(parts, wholes)]
    labels = {
        "rows": [f"layer {layer}" for layer in range(len(values))],
        "columns": [f"head {head}" for head in range(len(values[0]))],
    }
    return Figure("matrix", name, {**labels, "values": values})


class Cover(NamedTuple):
    """Lines of attention and, by head, what they come to, [kv_heads]."""

    mask: Tensor  # cells on a line, [kv_heads, n, m]
    cells: Tensor  # how many those are
    all_cells: Tensor  # and how many there are, on lines or not
    attention: Tensor  # of the sampled rows, on these cells
    all_attention: Tensor  # of the sampled rows, on all


def sampled(count: int, most: int) -> list[int]:
    """Rows of a stretch spread evenly, the last one always, no row twice."""
    most = min(count, most)
    return [count - 1 - (count * i) // most for i in range(most)][::-1]


def covering(weights: Tensor, queries: Tensor, rows: list[int], coverage: float) -> Cover:
    """The columns and diagonals with the most of the sampled rows' attention, until they carry `coverage` of it, by
    head.

    weights [kv_heads, n, m] of the rows at positions [n] over the slots at positions 0 .. m - 1. Lines are ranked once,
    by all that lies on them; where two cross, the cell counts for the first. The first token and every row's own are
    always on a line.
    """
    slots = torch.arange(weights.shape[2], device=weights.device)
    distance = queries[:, None] - slots  # [n, m]; below 0 there is nothing
    causal, distance = distance >= 0, distance.clamp(min=0)
    taken = _taken(weights[:, rows].masked_fill(~causal[rows], 0), distance[rows], int(queries.max()) + 1, coverage)
    columns, diagonals = taken[:, :len(slots)], taken[:, len(slots):]
    mask = (columns[:, None, :] | diagonals[:, distance]) & causal
    sample, cells = weights[:, rows], mask.sum((1, 2)).to(weights.dtype)
    return Cover(
        mask, cells, torch.full_like(cells, int(causal.sum())), (sample * mask[:, rows]).sum((1, 2)), sample.sum((1, 2))
    )


def _taken(sample: Tensor, distance: Tensor, far: int, coverage: float) -> Tensor:
    """Which columns, and after them which diagonals, are taken, [kv_heads, m + far]; sample [kv_heads, q, m] at
    distances [q, m] below `far`.
    """
    heads, _, m = sample.shape
    along = distance.expand_as(sample).flatten(1)
    diagonals = sample.new_zeros(heads, far).scatter_add(1, along, sample.flatten(1))
    mass = torch.cat([sample.sum(1), diagonals], 1)
    mass[:, [0, m]] = torch.inf
    # of equals columns come first, and of those the earlier
    rank = mass.argsort(dim=1, descending=True, stable=True).argsort(1)
    # the rank at which a cell is covered
    first = torch.minimum(rank[:, None, :m].expand_as(sample).flatten(1), rank[:, m:].gather(1, along))
    gained = torch.zeros_like(mass).scatter_add(1, first, sample.flatten(1)).cumsum(1)
    wanted = coverage * gained[:, -1:] - TINY
    count = (gained < wanted).sum(1, keepdim=True) + 1
    return rank < count.clamp(min=2)
