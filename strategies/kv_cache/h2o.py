"""Heavy hitters of attention, and the most recent tokens."""
from playground.algorithms.kv_cache.attention_scores import Votes, heaviest
from playground.contract import CachePolicy, knob
from playground.errors import Refusal


class H2O(CachePolicy):
    """Keep the tokens that have received the most attention so far, and the most recent ones.

    Every row votes: its attention weights are added to the tokens it looked at, in each layer and KV head by itself and
    summed over the query heads of a group. The prompt casts all its votes before the first slot is freed; from then on
    a row that is kept votes and the lightest token of the head goes. Votes are sums, not means, so early tokens, which
    more rows could see, are favoured. Zhang et al. 2023, arXiv 2306.14048.
    """

    name, title, paper, sheet = "h2o", "Heavy hitters (H2O)", "2306.14048", "kv-cache/kv-baselines"
    guarantee = ("budget_respected", "collapses")
    row_wise, watches = False, True

    heavy: int = knob(32, 0, 1024, step=1, help="tokens that stay because they received the most attention")
    recent: int = knob(32, 0, 1024, step=1, help="most recent tokens that stay whatever attention they received")

    def __post_init__(self):
        self.votes = Votes()

    def check(self):
        if self.heavy + self.recent == 0:
            raise Refusal("heavy and recent are both 0, so no token would stay: raise one of them.", "recent")

    @classmethod
    def holding(cls, tokens, prompt):
        return {"heavy": tokens // 2, "recent": tokens - tokens // 2}

    def attended(self, layer, weights, queries, keys):
        self.votes.add(layer, weights, keys)

    def retain(self, held):
        recent = held.positions >= held.next - self.recent
        return recent | heaviest(self.votes.of(held.layer, held.positions), self.heavy, held.live & ~recent)

    def budget(self, generated):
        return self.heavy + self.recent
