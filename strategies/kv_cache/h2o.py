"""H2O: heavy hitters by attention, and the most recent tokens."""
from playground.algorithms.kv_cache.attention_scores import AttentionScores
from playground.algorithms.kv_cache.topk_eviction import RanksSlots
from playground.contract import DecidesByHead, ReadsAttention, knob
from playground.errors import Refusal


class H2O(ReadsAttention, RanksSlots, DecidesByHead):
    """Keep the tokens that have received the most attention so far, and the most recent ones.

    Scores are cumulative attention weights of all committed query positions, per layer and KV head, summed over the
    query heads of a group. The prompt is read in full before the first eviction; then each committed token adds its
    weights, and the token of the head with the lowest score is evicted. Scores are sums, not means, so early tokens,
    which more positions can attend to, are favoured. Zhang et al. 2023, arXiv 2306.14048.
    """

    name, title, paper, sheet = "h2o", "Heavy hitters (H2O)", "2306.14048", "kv-cache/kv-baselines"

    heavy: int = knob(32, 0, 1024, step=1, help="tokens that stay because they received the most attention")
    recent: int = knob(32, 0, 1024, step=1, help="most recent tokens that always stay")

    def __post_init__(self):
        self.attention = AttentionScores()

    def check(self):
        if self.heavy + self.recent == 0:
            raise Refusal("heavy and recent are both 0, so no token stays: raise one of them.", "recent")

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"heavy": tokens // 2, "recent": tokens - tokens // 2}

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights, key_positions, self.text_length)

    def scores(self, held):
        return self.attention.of(held.layer, held.positions, held.next)

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone.attention = self.attention.for_heads(layer, heads)
        return alone

    def budget(self, generated):
        return self.heavy + self.recent
