"""Tokens with short keys stay."""
from playground.algorithms.kv_cache.topk_eviction import TopKEviction


class KeyNorm(TopKEviction):
    """Keep the tokens whose keys are shortest: in trained models those are the ones that will be attended to.

    Goes by the L2 norm of a key alone, in each layer and KV head by itself, so no attention has to be looked at and no
    query awaited. It is found in many models and explained in none; where it does not hold, this keeps the wrong half.
    A rotation changes no length, so positions do not matter. Devoto et al. 2024, arXiv 2406.11430, who leave the first
    layers whole; here every layer is cut.
    """

    name, title, paper, sheet = "key_norm", "By the length of keys", "2406.11430", "kv-cache/kv-baselines"

    def scores(self, held):
        return -held.read("keys").norm(dim=-1)
