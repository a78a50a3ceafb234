"""Eviction by the similarity of keys."""
from torch.nn.functional import cosine_similarity, normalize

from playground.algorithms.kv_cache.topk_eviction import TopKEviction
from playground.contract import DecidesByHead


class KeyDiff(TopKEviction, DecidesByHead):
    """Keep the tokens whose keys differ most from the others: distinctive keys tend to receive much attention.

    The score of a token is the negative cosine similarity of its key to the mean of the normalised keys that the same
    layer and KV head holds; the mean is recomputed for each eviction. No attention weights are needed. The authors
    evict after each block of a long prompt; here the prompt is a single block. Park et al. 2025, arXiv 2504.15364.
    """

    name, title, paper, sheet = "key_diff", "KeyDiff", "2504.15364", "kv-cache/key-diff"

    def scores(self, held):
        keys = held.read("keys")
        directions = normalize(keys, dim=-1).masked_fill(~held.live[..., None], 0.0)
        return -cosine_similarity(keys, directions.sum(1, keepdim=True), dim=-1)  # same direction as the mean
