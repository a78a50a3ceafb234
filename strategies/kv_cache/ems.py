"""EMS: evict, then merge, per head."""
import torch
from torch.nn.functional import avg_pool1d

from playground.algorithms.kv_cache.attention_scores import AttentionScores, MergedTokens, RecentAttention, top_slots
from playground.algorithms.kv_cache.prompt_compression import check_kernel
from playground.algorithms.kv_cache.slot_merging import TINY, NearestSlots, merge_by_mean, nearest
from playground.contract import DecidesByHead, Merges, ReadsAttention, knob
from playground.errors import Refusal
from playground.events import Figure


class EMS(ReadsAttention, Merges, DecidesByHead):
    """Evict the least important tokens, and merge those of medium importance into the most similar remaining token.
    Left out, since their formulas were not accessible: each head's own number of candidates by its sparsity, and
    directions of keys that are merged apart from their lengths.

    Importance is the larger of two shares: of the attention received from all positions that could attend to the token,
    and of that from the last positions. The former alone favours old tokens, the latter recent ones; as shares both
    have the same mean. In each head the most important tokens before the window become centres, the next ones are
    candidates, and all others are evicted. A candidate is merged into the centre with the largest product of the
    cosines of keys and values, and evicted if that is below `likeness`; so heads with different numbers of merges are
    processed in one step. A centre becomes the mean of its tokens, weighted by importance, and inherits their
    importance. No candidates, or a likeness above 1, is plain eviction.

    A reconstruction from the abstract and the public reviews of the paper, which name the three classes, equal means of
    both scores and the product of cosines. The larger of two shares, the weights and all defaults are our choices. Li
    et al. 2024, arXiv 2412.08521.
    """

    name, title, paper, sheet = "ems", "Evict, then merge (EMS)", "2412.08521", "kv-cache/ems"
    guarantee = ("budget_respected", "collapses")
    reconstruction, sure = True, "low"

    size: int = knob(64, 2, 2048, step=1, help="tokens that stay in each head, the window included")
    window: int = knob(
        16, 1, 128, step=1, help="most recent tokens, which are never merged and whose attention counts separately"
    )
    kernel: int = knob(
        5,
        1,
        15,
        step=2,
        help="neighbouring tokens whose recent attention is averaged, an odd number; 1 disables averaging",
    )
    candidates: float = knob(
        1.0, 0.0, 4.0, step=0.1, help="candidates for merging per token that stays before the window"
    )
    likeness: float = knob(
        0.3,
        -1.0,
        1.1,
        step=0.05,
        help="cosine of keys times that of values, below which a candidate is evicted; above 1 all are",
    )

    def __post_init__(self):
        self.attention, self.recent_attention = AttentionScores(), RecentAttention(self.window)
        self._pairs = {}  # by layer, from `retain` to `merge`: importance, candidates, nearest centres
        self._counts, self._shown = {}, False  # by layer: slots kept, merged, too dissimilar, not candidates

    def check(self):
        if self.size <= self.window:
            raise Refusal(f"size is {self.size} and the window takes {self.window}: raise size above it.", "size")
        check_kernel(self.kernel)

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"size": tokens, "window": min(cls.window, tokens // 2)}

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights, key_positions, self.text_length)
        self.recent_attention.add(layer, weights, key_positions)

    def retain(self, held):
        return self._retain([held])[0]

    def retain_all(self, held):
        """All layers at once if they have equal numbers of slots: layer by layer takes some fifty torch calls per
        token.
        """
        same_shape = len({layer.positions.shape for layer in held}) == 1
        return self._retain(held) if same_shape else super().retain_all(held)

    def _retain(self, held):
        """Which slots stay, for layers with equal numbers of slots."""
        if held[0].next < held[0].prompt:
            return [layer.live for layer in held]
        heads = len(held[0].read("keys"))
        positions = torch.cat([layer.positions.expand(heads, -1) for layer in held])
        live = torch.cat([layer.live.expand(heads, -1) for layer in held])
        late = positions >= held[0].next - self.window
        importance = self.importance(held, positions, late | ~live)
        centres = top_slots(importance, self.size - self.window, live & ~late)
        stays = late | centres
        candidates = top_slots(importance, round(self.candidates * (self.size - self.window)), live & ~stays)
        self._pair(held, importance, centres, candidates)
        return stays.split(heads)

    def _pair(self, held, importance, centres, candidates):
        """Store importance, candidates and their nearest centres for `merge`."""
        keys, values = ([layer.read(part) for layer in held] for part in ("keys", "values"))
        parts = (importance, candidates, *nearest(keys, centres, candidates, values))
        by_layer = zip(*(part.split(len(keys[0])) for part in parts))
        self._pairs |= {
            layer.layer: (scores, mask, NearestSlots(*pairs)) for layer, (scores, mask, *pairs) in zip(held, by_layer)
        }

    def importance(self, held, positions, others):
        """Importance of the slots at `positions`, zero for the `others`, all [heads of all layers, slots].

        The larger of the shares of overall attention per query position and of recent attention.
        """
        heads = len(positions) // len(held)
        overall, recent = (
            torch.cat([scores.of(layer.layer, layer.positions).expand(heads, -1) for layer in held])
            for scores in (self.attention, self.recent_attention)
        )
        recent = avg_pool1d(recent.masked_fill(others, 0), self.kernel, 1, self.kernel // 2)
        return shares(torch.stack([overall / (held[0].next - positions), recent]), others).amax(0)

    def merge(self, held, stays, goes):
        importance, candidates, pairs = self._pairs.pop(held.layer)
        merged = pairs.cosine >= self.likeness
        merge_map = pairs.merge_map(merged, stays.shape[1])
        if not self._shown:
            self._note(held.layer, *(int(mask.sum()) for mask in (stays, goes, candidates, merged)))
        if merge_map is None:
            return None
        moving = MergedTokens.of(merge_map, held.positions.expand(len(stays), -1))
        for scores in (self.attention, self.recent_attention):
            scores.move(held.layer, moving)
        return merge_by_mean(merge_map, importance[merge_map.sources], importance[merge_map.targets])

    def _note(self, layer, kept, evicted, candidates, merged):
        self._counts[layer] = [kept, merged, candidates - merged, evicted - candidates]

    def explain(self, prompt, layers):
        if self._counts and not self._shown:
            rows = [f"layer {layer}" for layer in self._counts]
            columns = ["kept", "merged", "too dissimilar", "no candidate"]
            values = list(self._counts.values())
            yield Figure("matrix", "slots at the first eviction", {"rows": rows, "columns": columns, "values": values})
            self._shown = True

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone.attention = self.attention.for_heads(layer, heads)
        alone.recent_attention = self.recent_attention.for_heads(layer, heads)
        alone._pairs, alone._counts = {}, {}
        return alone

    def rests(self, slots, length, prompt):
        return slots <= self.size

    def budget(self, generated):
        return self.size


def shares(received, others):
    """Attention [..., kv_heads, slots] as shares of the sum over all slots except the `others`, which get 0."""
    received = received.masked_fill(others, 0)
    return received.div_(received.sum(-1, keepdim=True).clamp_(min=TINY))
