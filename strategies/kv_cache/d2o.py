"""D2O: evicted tokens are merged into the most similar remaining ones."""
import math
from statistics import fmean

import torch

from playground.algorithms.kv_cache.attention_scores import AttentionScores, top_slots
from playground.algorithms.kv_cache.slot_merging import merge_by_mean, merge_sizes, nearest
from playground.contract import DecidesByHead, Merge, Merges, ReadsQueryHeads, knob
from playground.engine.sampling import REMOVED
from playground.events import Figure

LARGEST = torch.finfo(torch.float32).max  # score of tokens that always rank first
LEAST, MOST = 0.01, 1.0  # bounds of a layer's budget, as a share of the prompt


class D2O(ReadsQueryHeads, Merges, DecidesByHead):
    """Evict the tokens that received the least attention, and merge each into the most similar token that stays if
    their keys are similar enough.

    Layers whose attention is spread evenly get a larger budget. In each layer the variance over positions of the
    attention received is scaled from 0 to 1 across its query heads; budgets are a softmax over layers of the negative
    mean, as in the released code. Two heads always scale to 0 and 1, so with fewer than three query heads variances are
    scaled across layers instead, which `compared` can also set. Budgets are computed from the prompt and then fixed;
    eviction begins after the first decode step.

    As in H2O, the tokens with the most attention and the most recent ones stay. Of the evicted tokens, those whose
    largest cosine of keys reaches a moving average of such cosines are merged, keys and values alike, per head. Weights
    are exponentials of the cosine, as in the paper, or those of the released code, which shrink the merged states. The
    released code repeats keys for the heads of a group and makes one decision for all heads; here a group has one cache
    and every KV head decides. Without merging and at equal budgets this is H2O with sinks; without eviction in any
    layer it is the full cache. Wan et al. 2024, arXiv 2406.13035.
    """

    name, title, paper, sheet = "d2o", "Evict and merge (D2O)", "2406.13035", "kv-cache/d2o"
    guarantee, sure = ("collapses",), "medium"

    heavy: float = knob(
        0.1,
        0.02,
        0.5,
        step=0.01,
        help="tokens that stay by attention received, as a share of the prompt, averaged over layers",
    )
    recent: float = knob(
        0.1, 0.02, 0.5, step=0.01, help="most recent tokens that stay, as a share of the prompt; at least one"
    )
    sinks: int = knob(4, 0, 8, step=1, help="tokens at the start that always rank first by attention")
    memory: float = knob(
        0.5, 0.0, 1.0, step=0.05, help="weight of the old threshold in the average; 1 keeps the initial one"
    )
    weights: str = knob(
        "paper",
        choices=("paper", "released", "none"),
        help="weight of a merged token in its target; none merges nothing",
    )
    compared: str = knob("heads", choices=("heads", "layers"), help="variances are scaled across query heads or layers")
    first: int = knob(2, 0, 64, step=1, help="first layers without eviction")
    last: int = knob(1, 0, 64, step=1, help="last layers without eviction")

    def __post_init__(self):
        self.attention, self.thresholds = AttentionScores(), {}
        self._received = {}  # by layer, attention received by the tokens of the prompt, [query heads, tokens]
        self._budgets = []  # heavy and recent tokens of each layer
        self._statistics, self._shown = {}, False  # of merging, by tokens generated

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        share = min(0.5, max(0.02, tokens / prompt / 2))
        return {"heavy": share, "recent": share, "first": 0, "last": 0}

    def expected_share(self, full):
        cut = max(0, full.layers - self.first - self.last) / full.layers
        return 1 - cut * max(0.0, 1 - (self.heavy + self.recent) * full.prompt / full.length)

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights, key_positions, self.text_length)

    def observe_query_heads(self, layer, weights):
        received = weights.flatten(0, 1).sum(1)
        if (before := self._received.get(layer)) is not None:
            received[:, :before.shape[1]] += before
        self._received[layer] = received

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        if not self._budgets:
            self._budgets = self._layer_budgets(held)
        if held.next == held.prompt or held.layer < self.first or held.layer >= held.layers - self.last:
            return held.live
        heavy, recent = self._budgets[held.layer]
        late = held.positions >= held.next - recent
        received = self.attention.of(held.layer, held.positions, held.next)
        received = received.masked_fill(held.positions < self.sinks, LARGEST)
        return late | top_slots(received, heavy, held.live & ~late)

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone.attention, alone._statistics = self.attention.for_heads(layer, heads), {}
        known = self.thresholds.get(layer)
        alone.thresholds = {layer: [known[head] for head in heads.tolist()]} if known else {}
        return alone

    def _layer_budgets(self, held):
        """Heavy and recent tokens of each layer, as if every layer evicted."""
        nothing = torch.zeros(1, held.prompt, device=held.positions.device)  # a table model has no attention
        variance = torch.stack([variance_of(self._received.pop(layer, nothing)) for layer in range(held.layers)])
        length, whole = held.prompt + 1, self.heavy + self.recent
        shares = (budget_shares(unevenness(variance, self.compared)) * whole).clamp(LEAST, MOST).tolist()
        return [
            (_floor(length * share * self.heavy / whole), max(1, _floor(length * share * self.recent / whole)))
            for share in shares
        ]

    def merge(self, held, stays, goes):
        pairs = nearest([held.read("keys")], stays, goes)
        cosines = finite_by_head(pairs.cosine)
        threshold = pairs.cosine.new_tensor(self._update_thresholds(held.layer, cosines))
        merged = (pairs.cosine >= threshold[:, None]) & (self.weights != "none")
        merge_map, weights = pairs.merge_map(merged, stays.shape[1]), pairs.cosine[merged]
        self._note(held, cosines, len(weights))
        if merge_map is None:
            return None
        if self.weights == "released":
            sizes = merge_sizes(merge_map).to(weights)
            return Merge(merge_map, weights / sizes[merge_map.into], 1 / sizes)
        return merge_by_mean(merge_map, weights.exp(), weights.new_full(merge_map.targets[0].shape, math.e))

    def _update_thresholds(self, layer, cosines):
        """The threshold of each head, updated by the cosines of its evicted tokens; their mean at the first eviction.

        Infinite before any eviction.
        """
        before = self.thresholds.get(layer, [math.inf] * len(cosines))
        self.thresholds[layer] = [self._updated(threshold, head) for threshold, head in zip(before, cosines)]
        return self.thresholds[layer]

    def _updated(self, threshold, cosines):
        if not cosines:
            return threshold
        mean = fmean(cosines)
        return mean if math.isinf(threshold) else self.memory * threshold + (1 - self.memory) * mean

    def _note(self, held, cosines, merged):
        """Record means over the evicted tokens of a layer: cosine, threshold, share merged."""
        cosines = [cosine for head in cosines for cosine in head]
        if cosines:
            thresholds = [threshold for threshold in self.thresholds[held.layer] if not math.isinf(threshold)]
            self._statistics.setdefault(held.next - held.prompt, []).append(
                (fmean(cosines), fmean(thresholds), merged / len(cosines))
            )

    def explain(self, prompt, layers):
        if self._budgets and not self._shown:
            sizes = [
                sum(budget) if self.first <= layer < layers - self.last else prompt
                for layer, budget in enumerate(self._budgets)
            ]
            labels = [f"layer {layer}" for layer in range(layers)]
            yield Figure("bars", "budget of each layer, tokens", {"labels": labels, "values": sizes})
            self._shown = True
        for position, statistics in self._statistics.items():
            cosine, threshold, merged = (sum(column) / len(column) for column in zip(*statistics))
            series = {"cosine": cosine, "threshold": threshold}
            yield Figure("scalar", "cosine of evicted tokens to the nearest other", {"x": position, "series": series})
            yield Figure("scalar", "share of evicted tokens merged", {"x": position, "series": {"merged": merged}})
        self._statistics = {}


def finite_by_head(cosine):
    """The cosines [kv_heads, m] that are not padding, as lists by head: faster than tensor means for a few tokens."""
    return [[value for value in head if value > REMOVED] for head in cosine.tolist()]


def variance_of(received):
    """Variance over positions of the attention received, by head, [heads]; 0 for a single position."""
    return received.var(1) if received.shape[1] > 1 else torch.zeros_like(received[:, 0])


def unevenness(variance, compared):
    """Unevenness of each layer's attention, [layers], in 0 to 1.

    The variances [layers, heads] are scaled across the heads of a layer, if there are at least three, or across layers.
    """
    across = 1 if compared == "heads" and variance.shape[1] > 2 else 0
    low, high = variance.amin(across, keepdim=True), variance.amax(across, keepdim=True)
    return ((variance - low) / (high - low + 1e-6)).mean(1)


def budget_shares(uneven):
    """Budget of each layer relative to an even share, [layers]; larger if its attention is more even."""
    return (-uneven).softmax(0) * len(uneven)


def _floor(number):
    return math.floor(number + 1e-9)
