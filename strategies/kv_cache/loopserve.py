"""LoopServe: sparse prefill along lines of the attention matrix, then eviction by the latest rows of attention."""
from typing import NamedTuple

import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import RecentAttention, top_slots
from playground.contract import AttentionLines, ReadsAttention, SelectsLines, knob
from playground.events import Figure

TINY = 1e-6  # tolerance of the coverage, for rounding


class LoopServe(ReadsAttention, SelectsLines):
    """Compute the prefill only along the lines of the attention matrix with most of the attention, then evict
    periodically by the latest rows of attention. Reconstructed from the abstract: how lines are chosen is ours, and
    the turns of a dialogue are not distinguished.

    For a sample of the rows of each chunk, attention is computed in full. The columns (one token, for all rows) and
    diagonals (one distance, for all rows) with the largest sums are selected until they cover `coverage` of it, per
    layer and KV head, and all rows of the chunk attend along these lines only. From then on, every `period` tokens each
    head keeps the `size` tokens with the most attention from the last `period` rows, and those rows. Other tokens are
    evicted or, with `view`, masked: they stay in the cache and may become visible again, which shows the selection but
    saves no memory. Coverage 1 reads everything, and a size above the length of the text keeps everything.

    Of the other rows only the cells on lines are computed, which saves products of queries and keys unless a chunk has
    more lines than tokens before it; without a kernel for it, it saves no time on a text of a few hundred tokens.

    The lines, their order (by attention, ranked once) and all numbers are our choices; query heads of a group share
    their lines. A dialogue is one prompt: a chunk is the input of one forward, at most 128 tokens. Li et al. 2025,
    arXiv 2507.13681.
    """

    name, title, paper, sheet = (
        "loopserve",
        "Lines of attention, then the latest rows (LoopServe)",
        "2507.13681",
        "kv-cache/loopserve",
    )
    guarantee = ("collapses",)
    reconstruction, sure = True, "low"

    coverage: float = knob(
        0.95,
        0.5,
        1.0,
        step=0.01,
        help="share of the sampled attention that the lines of a chunk cover; 1 reads everything",
    )
    rows: int = knob(32, 1, 128, step=1, help="rows of a chunk that are sampled, including the last")
    size: int = knob(64, 1, 2048, step=1, help="tokens that stay besides the latest rows")
    period: int = knob(16, 1, 64, step=1, help="tokens between two selections, and rows of attention that select")
    dropped: str = knob(
        "gone", choices=("gone", "view"), help="free dropped tokens, or mask them until they are selected again"
    )

    def __post_init__(self):
        self.recent_attention, self._read = RecentAttention(self.period), {}
        self._last, self._views = {}, {}  # by layer: position of the last selection, mask of the visible slots
        self._turnover = {}  # slots dropped and restored, by tokens generated

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        period = min(cls.period, max(1, tokens // 4))
        return {"size": max(1, tokens - period), "period": period}

    def expected_share(self, full):
        return 1.0 if self.dropped == "view" else min(1.0, (self.size + 2 * self.period - 1) / full.length)

    # --- reading the prompt ---

    def selects_for(self, position, prompt):
        return self.coverage < 1 if position < prompt else bool(self._views)

    def sampled_rows(self, rows):
        return sampled(rows, self.rows)

    def select_lines(self, layer, weights, sampled, query_positions):
        cover = covering(weights, query_positions, sampled, self.coverage)
        self._read[layer] = self._read.get(layer, 0) + torch.stack(
            [cover.cells, cover.all_cells, cover.attention, cover.all_attention]
        )
        return cover.lines

    def select_for_rows(self, layer, weights, query_positions):
        """The slots visible in a view and all later ones, [kv_heads, n, slots]."""
        visible = self._views[layer][:, :weights.shape[2]]
        later = visible.new_ones(len(weights), weights.shape[2] - visible.shape[1])
        return torch.cat([visible.expand(len(weights), -1), later], 1)[:, None].expand_as(weights)

    # --- decoding ---

    def wants_attention(self, position, prompt):
        return position >= prompt - self.period

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.recent_attention.add(layer, weights, key_positions)

    def retain(self, held):
        due = max(held.prompt, self._last.get(held.layer, held.prompt - self.period) + self.period)
        if held.next < due:
            return held.live
        self._last[held.layer] = held.next
        late = held.positions >= held.next - self.period
        stays = late | top_slots(self.recent_attention.of(held.layer, held.positions), self.size, held.live & ~late)
        self._note(held, stays)
        if self.dropped == "gone":
            return stays
        self._views[held.layer] = stays
        return held.live

    def rests(self, slots, length, prompt):
        return length < max(prompt, min(self._last.values(), default=prompt - self.period) + self.period)

    def _note(self, held, stays):
        before = self._views.get(held.layer, held.live[:, :0])
        before = torch.cat([before, before.new_ones(len(before), stays.shape[1] - before.shape[1])], 1)
        tally = self._turnover.setdefault(held.next - held.prompt, {"dropped": 0, "restored": 0})
        tally["dropped"] += int((before & held.live & ~stays).sum())
        tally["restored"] += int((~before & stays).sum())

    def explain(self, prompt, layers):
        if self._read and self._last:
            sums = torch.stack([self._read[layer] for layer in sorted(self._read)], 1).tolist()
            yield _matrix("share of the prompt's attention matrix read", sums[0], sums[1])
            yield _matrix("share of the sampled attention covered", sums[2], sums[3])
            self._read = {}
        for position, tally in self._turnover.items():
            yield Figure("scalar", "slots dropped and restored", {"x": position, "series": tally})
        self._turnover = {}


def _matrix(name: str, parts: list[list[float]], wholes: list[list[float]]) -> Figure:
    """Shares by layer and KV head."""
    values = [[part / whole for part, whole in zip(*layer)] for layer in zip(parts, wholes)]
    labels = {
        "rows": [f"layer {layer}" for layer in range(len(values))],
        "columns": [f"head {head}" for head in range(len(values[0]))],
    }
    return Figure("matrix", name, {**labels, "values": values})


class Cover(NamedTuple):
    """Lines of attention and, by head, their sums, [kv_heads]."""

    lines: AttentionLines
    cells: Tensor  # number of these cells
    all_cells: Tensor  # number of causal cells
    attention: Tensor  # of the sampled rows, on these cells
    all_attention: Tensor  # of the sampled rows, on all cells


def sampled(count: int, most: int) -> list[int]:
    """At most `most` of `count` rows, evenly spaced, always including the last."""
    most = min(count, most)
    return [count - 1 - (count * i) // most for i in range(most)][::-1]


def covering(sample: Tensor, query_positions: Tensor, rows: list[int], coverage: float) -> Cover:
    """The columns and diagonals with the largest sums over the sampled rows that cover `coverage` of their attention.

    `sample` [kv_heads, q, m] are the weights of `rows`, sampled among query positions [n], over key positions 0 .. m -
    1. Lines are ranked once by their sums; a cell on two lines counts for the first. The first column and the main
    diagonal are always selected.
    """
    slots = torch.arange(sample.shape[2], device=sample.device)
    distance = query_positions[:, None] - slots  # [n, m]
    causal, distance = distance >= 0, distance.clamp(min=0)
    causal_sample = sample.masked_fill(~causal[rows], 0)
    chosen = _selected_lines(causal_sample, distance[rows], int(query_positions.max()) + 1, coverage)
    lines = AttentionLines(chosen[:, :len(slots)], chosen[:, len(slots):])
    mask = lines.mask(query_positions)
    cells = mask.sum((1, 2)).to(sample.dtype)
    return Cover(
        lines, cells, torch.full_like(cells, int(causal.sum())), (sample * mask[:, rows]).sum((1, 2)),
        sample.sum((1, 2)),
    )


def _selected_lines(sample: Tensor, distance: Tensor, length: int, coverage: float) -> Tensor:
    """Mask of the selected columns, then diagonals, [kv_heads, m + length].

    `sample` [kv_heads, q, m] are weights at distances [q, m] below `length`.
    """
    heads, _, m = sample.shape
    along = distance.expand_as(sample).flatten(1)
    diagonals = sample.new_zeros(heads, length).scatter_add(1, along, sample.flatten(1))
    mass = torch.cat([sample.sum(1), diagonals], 1)
    mass[:, [0, m]] = torch.inf
    rank = mass.argsort(dim=1, descending=True, stable=True).argsort(1)  # ties: columns first, then earlier lines
    # the rank of the line that covers a cell first
    first = torch.minimum(rank[:, None, :m].expand_as(sample).flatten(1), rank[:, m:].gather(1, along))
    covered = torch.zeros_like(mass).scatter_add(1, first, sample.flatten(1)).cumsum(1)
    target = coverage * covered[:, -1:] - TINY
    count = (covered < target).sum(1, keepdim=True) + 1
    return rank < count.clamp(min=2)
