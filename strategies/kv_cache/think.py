"""ThinK: channels of old keys that the queries hardly use are not stored."""
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from playground.contract import Quantises, ReadsQueries, knob
from playground.events import Figure


class ThinK(ReadsQueries, Quantises):
    """Drop the channels of old keys that contribute least to the products with the prompt's last queries.

    A channel's share of all attention logits is the norm of the queries' numbers in it times that of the keys'; per KV
    head the channels with the smallest product are dropped, averaged over the query heads of a group. They are chosen
    once, from the last `observed` queries of the prompt and the keys that are pruned first. The last `window` tokens
    keep all channels, and values are left as they are. Attention reads zeros in place of dropped channels, so this
    saves memory but no time. Useful together with eviction, since it saves along the other axis. ratio = 0 drops
    nothing. Xu et al. 2024, arXiv 2407.21018.
    """

    name, title, paper, sheet = "think", "Pruned key channels (ThinK)", "2407.21018", "kv-cache/think"
    guarantee = ("collapses",)

    ratio: float = knob(0.4, 0.0, 0.95, step=0.05, help="share of the channels of keys that is dropped")
    window: int = knob(32, 0, 1024, step=1, help="most recent tokens, whose keys keep all channels")
    observed: int = knob(32, 1, 512, step=1, help="last queries of the prompt, by which channels are chosen")

    def __post_init__(self):
        self._queries: dict[int, Tensor] = {}  # the last ones, by layer
        self._kept: dict[int, Tensor] = {}  # channels of each KV head, ascending, [kv_heads, kept]
        self._energy: dict[int, float] = {}

    def observe_queries(self, layer, query_states):
        seen = [self._queries[layer]] if layer in self._queries else []
        self._queries[layer] = torch.cat([*seen, query_states], 2)[:, :, -self.observed:]

    def quantise_count(self, part, exact):
        return max(0, exact - self.window) if part == "keys" and self.ratio else 0

    def quantised_bits(self, part, full):
        return full.bits * (full.head - self.dropped(full.head)) / full.head

    def dropped(self, d: int) -> int:
        """Number of dropped channels among d."""
        return int(self.ratio * d + 1e-9)

    def quantise_layer(self, layer, part, rows, packed):
        if layer not in self._kept:
            self._choose(layer, rows)
        kept = self._kept[layer][:, None].expand(-1, rows.shape[1], -1)
        pruned = KeptChannels(rows.shape[2], self._kept[layer], rows.gather(2, kept))
        return packed.concat(pruned) if packed else pruned

    def _choose(self, layer: int, keys: Tensor) -> None:
        """Choose the channels of each head that stay."""
        wide = torch.promote_types(keys.dtype, torch.float32)
        # a layer that reports no queries keeps the channels with the largest keys
        queries = self._queries.pop(layer, torch.ones_like(keys[:, None, :1])).to(keys.device, wide)
        energy = queries.square().mean((1, 2)) * keys.to(wide).square().mean(1)
        kept = energy.argsort(dim=-1, stable=True)[:, self.dropped(keys.shape[2]):]
        self._kept[layer] = kept.sort(-1).values
        self._energy[layer] = float(energy.gather(1, kept).sum() / energy.sum().clamp(min=1e-30))

    def explain(self, prompt, layers):
        if self._energy:
            data = {"labels": [f"layer {layer}" for layer in self._energy], "values": list(self._energy.values())}
            yield Figure("bars", "energy of the channels that stay", data)
        self._energy = {}


@dataclass(frozen=True)
class KeptChannels:
    """Keys [heads, count, d] of which each head stores some channels."""

    d: int
    channels: Tensor  # [heads, kept]
    numbers: Tensor  # [heads, count, kept]

    @property
    def count(self) -> int:
        return self.numbers.shape[1]

    @property
    def bytes(self) -> int:
        return self.numbers.nbytes

    def unpack(self, room: int = 0) -> Tensor:
        """The keys with zeros in dropped channels, [heads, count + room, d]; the last `room` of them are zero."""
        rows = self.numbers.new_zeros(len(self.numbers), self.count + room, self.d)
        rows[:, :self.count].scatter_(2, self.channels[:, None].expand(-1, self.count, -1), self.numbers)
        return rows

    def concat(self, later: "KeptChannels") -> "KeptChannels":
        """These keys followed by later ones."""
        return replace(self, numbers=torch.cat([self.numbers, later.numbers], 1))
