"""H2O: heavy hitters by attention, and the most recent tokens."""
from playground.algorithms.kv_cache.heavy_hitters import HeavyHitters


class H2O(HeavyHitters):
    """Keep the tokens that have received the most attention so far, and the most recent ones.

    Scores are cumulative attention weights of all committed query positions, per layer and KV head, summed over the
    query heads of a group. The prompt is read in full before the first eviction; then each committed token adds its
    weights, and the token of the head with the lowest score is evicted. Scores are sums, not means, so early tokens,
    which more positions can attend to, are favoured. Zhang et al. 2023, arXiv 2306.14048.
    """

    name, title, paper, sheet = "h2o", "Heavy hitters (H2O)", "2306.14048", "kv-cache/kv-baselines"
