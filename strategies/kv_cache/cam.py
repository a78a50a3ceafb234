"""CaM: the value of an evicted token is added to those of the tokens after it."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from playground.algorithms.kv_cache.drawn_numbers import DrawnNumbers
from playground.algorithms.kv_cache.heavy_hitters import HeavyHitters
from playground.contract import knob
from playground.events import Figure


class CaM(HeavyHitters):
    """Evict as H2O does, and add the value of each evicted token to the values of the next tokens that stay.

    What a row lost by the eviction of a token is its attention weight times its value. So the value is divided by the
    `spread` tokens after it and added to theirs; keys stay as they are. A coin decides, with the attention that the
    evicted token received so far as a share of the mean that these tokens received, at most 1: a token that hardly
    anything attended to is evicted without a trace. What the end of the prompt evicts is not merged, as in the paper,
    whose rule is one for decode steps: one token is evicted at a time.

    kvpress ranks by the mean of all KV heads and can wait for several tokens; here every KV head ranks its own tokens,
    as in the released code. A coin depends on layer, head and position, so drafts do not change it. Without merging
    this is H2O, and with room for the whole text the full cache. Zhang et al. 2024.
    """

    name, title, paper, sheet = "cam", "Evict and add to the next (CaM)", "Zhang et al. 2024", "kv-cache/kvzap"
    new_in = "2026"

    spread: int = knob(32, 1, 512, step=1, help="tokens after an evicted one that share its value")
    coin: str = knob(
        "drawn", choices=("drawn", "always", "never"), help="whether an evicted token is merged; never: H2O"
    )
    dice: int = knob(0, 0, 99, step=1, help="seed of the coins")

    def __post_init__(self):
        super().__post_init__()
        self._drawn = DrawnNumbers(self.dice)
        self._merged: dict[int, list[Tensor]] = {}  # by token generated: chance and coin of each layer's merges

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone._drawn, alone._merged = self._drawn.for_heads(layer, heads), {}
        return alone

    def evicting(self, held, stays):
        """Add values of slots that are evicted to those of slots that stay."""
        stays, goes = stays & held.live, held.live & ~stays
        if self.coin == "never" or held.next <= held.prompt or not bool(goes.any()):
            return
        after = Following.of(stays, goes, self.spread)
        chance = merge_chance(self.scores(held), after)
        values = held.read("values")
        if self.coin == "always":
            chance = torch.ones_like(chance)
        coins = self._drawn.of(held, len(values)).gather(1, after.sources) < chance
        held.write("values", with_added_values(values, coins, after))
        shares = torch.stack([chance.mean(), coins.to(chance).mean()])
        self._merged.setdefault(held.next - held.prompt, []).append(shares)

    def explain(self, prompt, layers):
        for position, found in self._merged.items():
            chance, merged = torch.stack(found).mean(0).tolist()
            series = {"chance": chance, "merged": merged}
            yield Figure("scalar", "share of evicted tokens merged", {"x": position, "series": series})
        self._merged = {}


class Following(NamedTuple):
    """The slots that stay after each slot that is evicted."""

    sources: Tensor  # slots that are evicted, [kv_heads, m]
    targets: Tensor  # slots after each of them, [kv_heads, m, spread]
    exist: Tensor  # bool, like `targets`: near the end of a text there are fewer

    @classmethod
    def of(cls, stays: Tensor, goes: Tensor, spread: int) -> Following:
        """At most `spread` slots of `stays` after each of `goes`, bool [kv_heads, slots], as many in every head."""
        kept, sources = (mask.nonzero()[:, 1].view(len(mask), -1) for mask in (stays, goes))
        first = torch.searchsorted(kept, sources, right=True)
        at = first[..., None] + torch.arange(spread, device=kept.device)
        exist = at < kept.shape[1]
        targets = kept.gather(1, at.clamp(max=kept.shape[1] - 1).flatten(1)).view_as(at)
        return cls(sources, targets, exist)

    @property
    def counts(self) -> Tensor:
        """How many slots share a value, at least 1, [kv_heads, m]."""
        return self.exist.sum(-1).clamp(min=1)


def merge_chance(received: Tensor, after: Following) -> Tensor:
    """Probability that each evicted slot is merged, [kv_heads, m], given the attention received [kv_heads, slots].

    Its attention as a share of the mean of the slots after it, at most 1.

    Where nothing attended to the slots after it, it is 1, or 0 if nothing attended to itself either.
    """
    around = received.gather(1, after.targets.flatten(1)).view_as(after.targets) * after.exist
    share = received.gather(1, after.sources) / (around.sum(-1) / after.counts)
    return share.nan_to_num(nan=0.0, posinf=1.0).clamp(0, 1)


def with_added_values(values: Tensor, coins: Tensor, after: Following) -> Tensor:
    """Values [kv_heads, slots, d], with those of evicted slots whose coin [kv_heads, m] says so added to the next."""
    d = values.shape[2]
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    parts = wide.gather(1, after.sources[..., None].expand(-1, -1, d)) * (coins.to(wide) / after.counts)[..., None]
    added = (parts[:, :, None] * after.exist[..., None]).flatten(1, 2)
    return wide.scatter_add(1, after.targets.flatten(1)[..., None].expand(-1, -1, d), added).to(values.dtype)
