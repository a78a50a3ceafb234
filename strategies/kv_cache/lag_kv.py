"""Eviction by the spread of normalised keys and values."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.topk_eviction import TopKEviction
from playground.contract import DecidesByHead, knob

ALWAYS = 2.0  # above every share


class LagKV(TopKEviction, DecidesByHead):
    """Keep, in every partition of the text, the tokens that deviate most when normalised by the next partition.

    After the first `sinks` tokens the text is divided into partitions of `lag` tokens. In each, keys and values are
    normalised channel by channel by the minimum and maximum of the next partition; a token's score is the standard
    deviation over its channels, as a softmax over the partition, summed for keys and values. Tokens are compared by
    their rank within the partition, so each partition keeps the same share; the sinks, the last complete partition and
    the tokens after it rank first. Useful for long prompts of uniform importance, and needs no attention weights. The
    authors evict once per partition; here the ranks are recomputed for each eviction, among the remaining tokens. Liang
    et al. 2025, arXiv 2504.04704.
    """

    name, title, paper, sheet = "lag_kv", "LagKV", "2504.04704", "kv-cache/lag-kv"

    sinks: int = knob(4, 0, 64, step=1, help="first tokens of the text, which always rank first")
    lag: int = knob(16, 2, 256, step=1, help="tokens per partition")

    def scores(self, held):
        keys, values = held.read("keys"), held.read("values")
        live = held.live.expand(keys.shape[:2])
        found = torch.full(live.shape, ALWAYS, dtype=keys.dtype, device=live.device)
        for head, row in enumerate(live):
            slots = row.nonzero()[:, 0][self.sinks:]
            partitions = slots[:len(slots) // self.lag * self.lag].view(-1, self.lag)
            if len(partitions) > 1:
                deviations = sum(spread(states[head][partitions]) for states in (keys, values))
                found[head, partitions[:-1]] = ranks(deviations)
        return found


def spread(states: Tensor) -> Tensor:
    """For all partitions but the last: a softmax over the tokens of the deviation across their channels, scaled by the
    next partition; [n - 1, lag] from [n, lag, d].
    """
    low, high = states[1:].amin(1, keepdim=True), states[1:].amax(1, keepdim=True)
    scaled = (states[:-1] - low) / (high - low).clamp(min=torch.finfo(states.dtype).tiny)
    return scaled.std(-1, correction=min(1, scaled.shape[-1] - 1)).softmax(-1)


def ranks(scores: Tensor) -> Tensor:
    """The share of lower scores in each row, in [0, 1); of equal scores the later one counts as higher, [n, lag]."""
    order, size = scores.argsort(stable=True), scores.shape[-1]
    return torch.empty_like(scores).scatter(-1, order, (torch.arange(size).to(scores) / size).expand_as(scores))
