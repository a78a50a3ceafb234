"""All layers keep the same share of their attention, each with as many tokens as that takes."""
import math

import torch

from playground.algorithms.kv_cache.attention_scores import Votes, heaviest
from playground.contract import CachePolicy, knob
from playground.events import Figure

CLOSE, ROUNDS = 5, 60  # the search for a level ends within so many tokens of what is to go, or after so many halvings


class PrefixKV(CachePolicy):
    """Cut the prompt so that every layer keeps the same share of the attention its tokens received, be they few or
    many.

    The tokens of a layer are sorted by the attention the whole prompt paid them, over all heads, and keeping the best
    is keeping a prefix of that list. One level is searched for, the same for all layers, such that the prefixes that
    reach it add up to `keep` of the prompt: a layer that gathers its attention needs few tokens, one that spreads it
    many. Afterwards a layer holds to its own ratio as the text grows: the oldest of its tail goes, whatever it is
    worth, and what the prompt left in front of the tail is frozen. Made for pictures in the prompt; nothing in it is
    about pictures. Wang et al. 2024, arXiv 2412.03409.
    """

    name, title, paper, sheet = "prefixkv", "One level for all layers (PrefixKV)", "2412.03409", "kv-cache/prefixkv"
    guarantee = ("collapses",)
    row_wise, watches = False, True

    keep: float = knob(0.5, 0.05, 1.0, step=0.05, help="share of the prompt that stays, over all layers; 1 keeps all")
    sinks: int = knob(1, 0, 8, step=1, help="tokens at the very start that always stay")
    tail: int = knob(25, 1, 128, step=1, help="last tokens of what the prompt leaves, which go first as the text grows")

    def __post_init__(self):
        self.votes, self._forgotten, self._frozen, self._shown = Votes(), [], {}, False

    @classmethod
    def holding(cls, tokens, prompt):
        return {"keep": min(1.0, max(0.05, tokens / prompt))}

    def promise(self, full):
        return self.keep

    def wants(self, position, prompt):
        return position < prompt

    def attended(self, layer, weights, queries, keys):
        self.votes.add(layer, weights.sum(0, keepdim=True), keys)

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        if held.layer in self._frozen:
            return self._with_the_tail_moved_on(held)
        if not self._forgotten:
            self._forgotten = self.counts(
                torch.cat([self.votes.of(layer, held.positions[:1, : held.prompt]) for layer in range(held.layers)])
            )
        return self._cut(held)

    def _cut(self, held):
        """The prompt without the tokens that its layer has to forget; the start of it stays, and the last token."""
        kept = held.prompt - self._forgotten[held.layer]
        self._frozen[held.layer] = kept - self.tail if kept > self.tail else kept // 2
        safe = (held.positions < self.sinks) | (held.positions >= held.prompt - 1)
        inside = int((safe & (held.positions < held.prompt)).sum())
        return safe | heaviest(self.votes.of(held.layer, held.positions), kept - inside, held.live & ~safe)

    def _with_the_tail_moved_on(self, held):
        """Without the oldest slots behind the frozen ones, as many as the layer's ratio asks for."""
        first, count = self._frozen[held.layer], held.positions.shape[1]
        ratio = 1 - self._forgotten[held.layer] / held.prompt
        surplus = max(0, math.floor(count - held.next * ratio + 1e-9))
        slots = torch.arange(count, device=held.positions.device)[None]
        return (slots < first) | (slots >= first + surplus)

    def counts(self, votes):
        """How many tokens of the prompt each layer forgets, by the votes [layers, prompt]."""
        length, total = votes.shape[1], math.floor((1 - self.keep) * votes.numel() + 1e-9)
        most = max(0, length - self.sinks - 1)
        return _scaled([min(most, length - count) for count in level(votes, total, self.sinks + 1)], total, most)

    def explain(self, prompt, layers):
        if not self._shown and self._forgotten:
            kept = [prompt - forgotten for forgotten in self._forgotten]
            yield Figure(
                "bars", "prompt tokens kept", {"labels": [f"layer {layer}" for layer in range(layers)], "values": kept}
            )
            self._shown = True


def level(votes, total, safe=0):
    """Tokens each layer keeps where all keep the same share of their votes [layers, n], and `total` of them go, give or
    take a few.

    Of those that a layer does not keep, `safe` stay besides.
    """
    curves = votes.cpu().double().sort(-1, descending=True).values.cumsum(-1)
    curves = curves / curves[:, -1:].clamp(min=1e-30)
    low, high = 0.0, 1.0
    for _ in range(ROUNDS):
        share = (low + high) / 2
        kept = ((curves < share).sum(-1) + 1).clamp(max=votes.shape[1])
        off = int((votes.shape[1] - kept - safe).clamp(min=0).sum()) - total
        if abs(off) < CLOSE:
            break
        low, high = (low, share) if off < 0 else (share, high)
    return kept.tolist()


def _scaled(forgotten, total, most):
    """Counts in the same proportion that add up to `total`, none above `most`; what rounding leaves goes to those who
    forget most.
    """
    scale = total / max(1, sum(forgotten))
    scaled = [min(most, math.floor(count * scale)) for count in forgotten]
    for layer in sorted(range(len(scaled)), key=lambda at: -forgotten[at]):
        more = min(most - scaled[layer], total - sum(scaled))
        scaled[layer] += more
    return scaled
