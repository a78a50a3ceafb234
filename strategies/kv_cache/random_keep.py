"""Random eviction."""
from playground.algorithms.kv_cache.drawn_numbers import DrawnNumbers
from playground.algorithms.kv_cache.topk_eviction import TopKEviction
from playground.contract import DecidesByHead, knob


class RandomKeep(TopKEviction, DecidesByHead):
    """Keep a random sample of the tokens: the baseline that every selection rule has to beat.

    Each token of a layer and KV head gets a random score once, and the largest scores stay, so the kept tokens are
    always a uniform sample of the text: early and late tokens are equally likely to stay. With `recent` it is H2O with
    random scores. A baseline; the sampling is Vitter's reservoir, 1985.
    """

    name, title, paper, sheet = "random_keep", "By chance", "Vitter 1985", "kv-cache/kv-baselines"

    dice: int = knob(0, 0, 99, step=1, help="seed of the random scores")

    def __post_init__(self):
        self._drawn = DrawnNumbers(self.dice)

    def scores(self, held):
        return self._drawn.of(held, len(held.read("keys")))

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone._drawn = self._drawn.for_heads(layer, heads)
        return alone
