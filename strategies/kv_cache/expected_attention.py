"""Eviction by the attention that future queries are expected to pay."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.topk_eviction import TopKEviction
from playground.contract import DecidesByHead, ReadsQueries, knob
from playground.engine.sampling import REMOVED


class ExpectedAttention(ReadsQueries, TopKEviction, DecidesByHead):
    """Keep the tokens that future queries are expected to attend to, assuming that they are distributed like the last
    queries of the prompt.

    If queries are Gaussian with mean m and covariance S, the expected unnormalised weight of a key k is exp(m k / sqrt
    d + k S k / 2d). A softmax over the tokens, averaged over the query heads of a group and multiplied by the norm of
    the value, is the score. Useful if the question that determines the relevant tokens is not in the prompt yet. The
    authors estimate m and S before the rotary embedding and rotate them by the mean over coming positions; here they
    are those of the last `window` queries of the prompt, after the rotary embedding. Devoto et al. 2025, arXiv
    2510.00636.
    """

    name, title, paper, sheet = "expected_attention", "Expected attention", "2510.00636", "kv-cache/expected-attention"
    reconstruction, sure = True, "medium"

    window: int = knob(32, 2, 512, step=1, help="last queries of the prompt, whose mean and covariance are used")

    def __post_init__(self):
        self._queries: dict[int, Tensor] = {}

    def observe_queries(self, layer, query_states):
        seen = [self._queries[layer]] if layer in self._queries else []
        self._queries[layer] = torch.cat([*seen, query_states], 2)[:, :, -self.window:]

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone._queries = {layer: self._queries[layer][heads]} if layer in self._queries else {}
        return alone

    def scores(self, held):
        keys = held.read("keys")
        # none if a layer reports no queries
        queries = self._queries.get(held.layer, torch.zeros_like(keys[:, None, :1]))
        logs = expected_logits(keys, queries.to(keys)).masked_fill(~held.live[:, None], REMOVED)
        return logs.softmax(-1).mean(1) * held.read("values").norm(dim=-1)


def expected_logits(keys: Tensor, queries: Tensor) -> Tensor:
    """ln E exp(q k / sqrt d) of each key under a Gaussian with the mean and covariance of the queries.

    [heads, group, slots] from keys [heads, slots, d] and queries [heads, group, n, d].
    """
    mean, d = queries.mean(2, keepdim=True), keys.shape[-1]
    around = (queries - mean) @ keys[:, None].transpose(-1, -2)  # [heads, group, n, slots]
    return (mean @ keys[:, None].transpose(-1, -2))[:, :, 0] / d**0.5 + around.square().mean(2) / (2 * d)
