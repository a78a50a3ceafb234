"""Eviction by the main direction of the queries."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.topk_eviction import TopKEviction
from playground.contract import DecidesByHead, ReadsQueries


class QFilters(ReadsQueries, TopKEviction, DecidesByHead):
    """Keep the tokens whose keys align with the main direction of the queries, which predicts the attention they
    receive.

    The direction is the first right singular vector of all queries of a KV head, oriented towards their mean; the score
    of a token is the projection of its key on it. Useful where attention weights are not available; it costs one dot
    product per key. The authors compute the directions once per model from a calibration text; here they come from the
    queries of the prompt. Godey et al. 2025, arXiv 2503.02812.
    """

    name, title, paper, sheet = "q_filters", "Q-Filters", "2503.02812", "kv-cache/q-filters"
    reconstruction, sure = True, "medium"

    def __post_init__(self):
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: sums of q q^T [heads, d, d] and of q [heads, d]
        self._directions: dict[int, Tensor] = {}

    def observe_queries(self, layer, query_states):
        queries = query_states.flatten(1, 2)
        queries = queries.to(torch.promote_types(queries.dtype, torch.float32))
        new = queries.transpose(1, 2) @ queries, queries.sum(1)
        before = self._seen.get(layer)
        self._seen[layer] = new if before is None else (before[0] + new[0], before[1] + new[1])

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone._seen = {at: tuple(part[heads] for part in sums) for at, sums in self._seen.items() if at == layer}
        alone._directions = {at: part[heads] for at, part in self._directions.items() if at == layer}
        return alone

    def scores(self, held):
        keys = held.read("keys")
        if held.layer not in self._seen:  # a layer that reports no queries: the latest tokens stay
            return keys.new_zeros(keys.shape[:2])
        if held.layer not in self._directions:
            self._directions[held.layer] = main_direction(*self._seen[held.layer])
        return (keys @ self._directions[held.layer].to(keys)[:, :, None])[..., 0]


def main_direction(squares: Tensor, sums: Tensor) -> Tensor:
    """The eigenvector of the largest eigenvalue of each head's sum of q q^T [heads, d, d], [heads, d].

    Its sign is that of its product with the sum of the queries [heads, d].
    """
    first = torch.linalg.eigh(squares).eigenvectors[..., -1]
    return torch.where((first * sums).sum(-1, keepdim=True) < 0, -first, first)
