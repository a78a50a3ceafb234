"""Eviction by the L2 norm of keys."""
from playground.algorithms.kv_cache.topk_eviction import TopKEviction
from playground.contract import DecidesByHead


class KeyNorm(TopKEviction, DecidesByHead):
    """Keep the tokens whose keys have the smallest L2 norm: in many trained models those receive the most attention.

    Works per layer and KV head and needs no attention weights. The correlation is an empirical finding; in a model
    without it the wrong tokens stay. Rotary embeddings preserve norms, so positions do not matter. Devoto et al. 2024,
    arXiv 2406.11430, who do not evict in the first layers; here every layer evicts.
    """

    name, title, paper, sheet = "key_norm", "By the length of keys", "2406.11430", "kv-cache/kv-baselines"

    def scores(self, held):
        return -held.read("keys").norm(dim=-1)
