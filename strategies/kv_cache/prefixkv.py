"""PrefixKV: layer budgets such that all layers keep the same share of their attention."""
import math

import torch

from playground.algorithms.kv_cache.attention_scores import AttentionScores, top_slots
from playground.contract import DecidesByHead, ReadsAttention, knob
from playground.events import Figure

CLOSE, ROUNDS = 5, 60  # the search ends within CLOSE tokens of the target, or after ROUNDS bisections


class PrefixKV(ReadsAttention, DecidesByHead):
    """Evict prompt tokens such that every layer keeps the same share of the attention its tokens received.

    The tokens of a layer are sorted by the attention received from the whole prompt, summed over all heads; a layer
    keeps a prefix of that list. Bisection finds the share of attention, common to all layers, at which the prefixes add
    up to `keep` of the prompt: a layer with concentrated attention needs few tokens, one with spread attention many.
    Afterwards each layer keeps its own ratio as the text grows: the oldest token of the tail is evicted regardless of
    its score, and the prompt tokens before the tail are frozen. Designed for images in the prompt, but independent of
    them. Wang et al. 2024, arXiv 2412.03409.
    """

    name, title, paper, sheet = "prefixkv", "One level for all layers (PrefixKV)", "2412.03409", "kv-cache/prefixkv"
    guarantee = ("collapses",)

    keep: float = knob(0.5, 0.05, 1.0, step=0.05, help="share of the prompt that stays, over all layers; 1 keeps all")
    sinks: int = knob(1, 0, 8, step=1, help="tokens at the start that always stay")
    tail: int = knob(25, 1, 128, step=1, help="last of the kept prompt tokens, evicted first as the text grows")

    def __post_init__(self):
        self.attention, self._evicted, self._frozen, self._shown = AttentionScores(), [], {}, False

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"keep": min(1.0, max(0.05, tokens / prompt))}

    def expected_share(self, full):
        return self.keep

    def wants_attention(self, position, prompt):
        return position < prompt

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights.sum(0, keepdim=True), key_positions, self.text_length)

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        if held.layer in self._frozen:
            return self._evict_tail(held)
        if not self._evicted:
            self._evicted = self.counts(
                torch.cat([self.attention.of(layer, held.positions[:1, : held.prompt]) for layer in range(held.layers)])
            )
        return self._evict_prompt(held)

    def _evict_prompt(self, held):
        """The slots kept of the prompt; its first `sinks` tokens and the last one always stay."""
        kept = held.prompt - self._evicted[held.layer]
        self._frozen[held.layer] = kept - self.tail if kept > self.tail else kept // 2
        safe = (held.positions < self.sinks) | (held.positions >= held.prompt - 1)
        inside = int((safe & (held.positions < held.prompt)).sum())
        received = self.attention.of(held.layer, held.positions, held.next)
        return safe | top_slots(received, kept - inside, held.live & ~safe)

    def _evict_tail(self, held):
        """All slots except the oldest after the frozen ones, as many as the layer's ratio requires."""
        first, count = self._frozen[held.layer], held.positions.shape[1]
        ratio = 1 - self._evicted[held.layer] / held.prompt
        surplus = max(0, math.floor(count - held.next * ratio + 1e-9))
        slots = torch.arange(count, device=held.positions.device)[None]
        return (slots < first) | (slots >= first + surplus)

    def rests(self, slots, length, prompt):
        return bool(self._evicted) and not any(self._evicted)

    def counts(self, scores):
        """Number of prompt tokens that each layer evicts, by scores [layers, prompt]."""
        length, total = scores.shape[1], math.floor((1 - self.keep) * scores.numel() + 1e-9)
        most = max(0, length - self.sinks - 1)
        return _scaled([min(most, length - count) for count in level(scores, total, self.sinks + 1)], total, most)

    def explain(self, prompt, layers):
        if not self._shown and self._evicted:
            kept = [prompt - evicted for evicted in self._evicted]
            yield Figure(
                "bars", "prompt tokens kept", {"labels": [f"layer {layer}" for layer in range(layers)], "values": kept}
            )
            self._shown = True


def level(scores, total, safe=0):
    """Tokens each layer keeps if all keep the same share of their scores [layers, n] and about `total` are evicted.

    Of the tokens that a layer does not keep, `safe` are not evicted either.
    """
    curves = scores.cpu().double().sort(-1, descending=True).values.cumsum(-1)
    curves = curves / curves[:, -1:].clamp(min=1e-30)
    low, high = 0.0, 1.0
    for _ in range(ROUNDS):
        share = (low + high) / 2
        kept = ((curves < share).sum(-1) + 1).clamp(max=scores.shape[1])
        off = int((scores.shape[1] - kept - safe).clamp(min=0).sum()) - total
        if abs(off) < CLOSE:
            break
        low, high = (low, share) if off < 0 else (share, high)
    return kept.tolist()


def _scaled(evicted, total, most):
    """Counts in the same proportion that add up to `total`, none above `most`.

    The remainder goes to the layers with the largest counts.
    """
    scale = total / max(1, sum(evicted))
    scaled = [min(most, math.floor(count * scale)) for count in evicted]
    for layer in sorted(range(len(scaled)), key=lambda at: -evicted[at]):
        more = min(most - scaled[layer], total - sum(scaled))
        scaled[layer] += more
    return scaled
