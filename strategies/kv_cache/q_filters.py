"""Eviction by the main direction of the queries."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.topk_eviction import TopKEviction


class QFilters(TopKEviction):
    """Keep the tokens whose keys point where the queries do: one direction tells which keys will be attended to.

    The direction is the first right singular vector of all queries of a KV head, turned towards their mean; the score
    of a token is the projection of its key on it. It helps where attention weights are not available, and costs one
    product per key. The authors compute the directions once per model from a calibration text; here they come from the
    queries of the prompt. Godey et al. 2025, arXiv 2503.02812.
    """

    name, title, paper, sheet = "q_filters", "Q-Filters", "2503.02812", "kv-cache/q-filters"
    uses_queries, reconstruction, sure = True, True, "medium"

    def __post_init__(self):
        self._queries: dict[int, list[Tensor]] = {}
        self._directions: dict[int, Tensor] = {}

    def observe_queries(self, layer, query_states):
        self._queries.setdefault(layer, []).append(query_states.flatten(1, 2))

    def scores(self, held):
        if held.layer not in self._directions:
            self._directions[held.layer] = directions(torch.cat(self._queries.pop(held.layer), 1))
        keys = held.read("keys")
        return (keys @ self._directions[held.layer].to(keys)[:, :, None])[..., 0]


def directions(queries: Tensor) -> Tensor:
    """The first right singular vector of the queries of each head, with a positive mean projection; [heads, d] from
    [heads, n, d].
    """
    wide = queries.to(torch.promote_types(queries.dtype, torch.float32))
    first = torch.linalg.svd(wide, full_matrices=False).Vh[:, 0]
    sign = (wide.mean(1) * first).sum(-1, keepdim=True)
    return torch.where(sign < 0, -first, first)
