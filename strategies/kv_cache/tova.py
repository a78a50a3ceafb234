"""TOVA: eviction by the attention of the last token."""
from playground.algorithms.kv_cache.attention_scores import AttentionScores
from playground.algorithms.kv_cache.topk_eviction import RanksSlots
from playground.contract import DecidesByHead, ReadsAttention, knob


class Tova(ReadsAttention, RanksSlots, DecidesByHead):
    """Evict the token that receives the least attention from the newest one, regardless of its position.

    Scores are the attention weights of the last committed token only, summed over all heads of a layer, which keep the
    same tokens. No token is protected, neither at the start of the text nor at its end. After the prefill the prompt's
    last token decides. If several draft tokens are accepted at once, the last of them decides. Oren et al. 2024, arXiv
    2401.06104.
    """

    name, title, paper, sheet = "tova", "By the last token's attention (TOVA)", "2401.06104", "kv-cache/kv-baselines"
    recent = 0

    size: int = knob(64, 1, 2048, step=1, help="tokens that stay")

    def __post_init__(self):
        self.attention, self._heads = AttentionScores(), 0  # KV heads of a text

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"size": tokens}

    def wants_attention(self, position, prompt):
        return position >= prompt - 1

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self._heads = self._heads or len(weights)  # the prompt is one text
        received = self._summed(weights[:, -1:])
        if not len(received) == len(key_positions) == 1:  # the heads of several texts do not hold the same tokens
            received = received.repeat_interleave(self._heads, 0)
        self.attention.replace(layer, received, key_positions, self.text_length)

    def _summed(self, weights):
        """Weights [texts * heads, 1, slots] summed over the heads of each text, [texts, 1, slots]."""
        return weights.unflatten(0, (-1, self._heads)).sum(1)

    def scores(self, held):
        return self.attention.of(held.layer, held.positions, held.next)

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone.attention = self.attention.for_heads(layer, heads)
        return alone

    def budget(self, generated):
        return self.size
