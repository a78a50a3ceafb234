"""Eviction by the spread of normalised keys and values."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.topk_eviction import TopKEviction
from playground.contract import knob

ALWAYS = 2.0  # above every share


class LagKV(TopKEviction):
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
        live = held.live.expand(held.read("keys").shape[:2])
        found = torch.full(live.shape, ALWAYS, dtype=held.read("keys").dtype, device=live.device)
        for head, row in enumerate(live):
            slots = row.nonzero()[:, 0][self.sinks:]
            partitions = slots[:len(slots) // self.lag * self.lag].view(-1, self.lag)
            states = [held.read(part)[head] for part in ("keys", "values")]
            for here, after in zip(partitions, partitions[1:]):
                found[head, here] = ranks(sum(spread(each[here], each[after]) for each in states))
        return found


def spread(here: Tensor, after: Tensor) -> Tensor:
    """Softmax over tokens of the deviation across their channels, scaled by the tokens after them; [n] from [n, d]."""
    low, high = after.amin(0), after.amax(0)
    scaled = (here - low) / (high - low).clamp(min=torch.finfo(here.dtype).tiny)
    return scaled.std(-1, correction=min(1, scaled.shape[-1] - 1)).softmax(-1)


def ranks(scores: Tensor) -> Tensor:
    """The share of lower scores, in [0, 1); of equal scores the later one counts as higher, [n]."""
    order = scores.argsort(stable=True)
    return torch.empty_like(scores).scatter(0, order, torch.arange(len(scores)).to(scores) / len(scores))
