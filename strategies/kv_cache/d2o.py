"""Tokens that are evicted live on in those that are most like them."""
import math
from statistics import fmean

import torch

from playground.algorithms.kv_cache.attention_scores import Votes, heaviest
from playground.algorithms.kv_cache.slot_merging import averaged, company, nearest
from playground.contract import CachePolicy, Merge, knob
from playground.engine.sampling import REMOVED
from playground.events import Figure

LARGEST = torch.finfo(torch.float32).max  # the attention of tokens that count as the most attended
LEAST, MOST = 0.01, 1.0  # share of the prompt that a layer may be dealt


class D2O(CachePolicy):
    """Evict the least attended tokens, but merge each into the token that stays and is most like it, if it is like it
    enough.

    Layers whose attention is spread evenly get more room: in each the variance over positions of the attention received
    is scaled from 0 to 1 across its heads, and a softmax over layers of the mean's negative deals out the room. That is
    as released; two heads always differ by as much, so with fewer than three all layers are dealt the same, unless
    variances are scaled across layers. The prompt settles it, and what a layer may hold from then on; the cut comes
    once the first row behind it has voted.

    As in H2O, the most attended tokens and the most recent ones stay. Of those that go, the ones whose cosine of keys
    reaches a moving average of such cosines are merged, keys and values alike, a head at a time; weights are
    exponentials of the cosine, as in the paper, or those of the released code, which shorten rows. The code repeats
    keys for the heads of a group and lets all heads share one decision; here a group has one cache, and every head
    decides. Without merging and at equal room this is H2O with sinks; with all layers whole it is the full cache. Wan
    et al. 2024, arXiv 2406.13035.
    """

    name, title, paper, sheet = "d2o", "Evict and merge (D2O)", "2406.13035", "kv-cache/d2o"
    guarantee, sure = ("collapses",), "medium"
    row_wise, watches, merges = False, True, True

    heavy: float = knob(
        0.1,
        0.02,
        0.5,
        step=0.01,
        help="tokens that stay by the attention they received, as a share of the prompt and over all layers",
    )
    recent: float = knob(0.1, 0.02, 0.5, step=0.01, help="most recent tokens that stay, likewise; one at least")
    sinks: int = knob(4, 0, 8, step=1, help="tokens at the very start that count as the most attended")
    memory: float = knob(0.5, 0.0, 1.0, step=0.05, help="share of the old threshold in the new one; 1 keeps the first")
    weights: str = knob(
        "paper",
        choices=("paper", "released", "none"),
        help="how much of a token is left in the one it is merged into; none merges nothing",
    )
    compared: str = knob("heads", choices=("heads", "layers"), help="across what the variances of attention are scaled")
    first: int = knob(2, 0, 64, step=1, help="first layers that are left whole")
    last: int = knob(1, 0, 64, step=1, help="last layers that are left whole")

    def __post_init__(self):
        self.votes, self.thresholds, self._room, self._seen, self._shown = Votes(), {}, [], {}, False

    @classmethod
    def holding(cls, tokens, prompt):
        share = min(0.5, max(0.02, tokens / prompt / 2))
        return {"heavy": share, "recent": share, "first": 0, "last": 0}

    def promise(self, full):
        cut = max(0, full.layers - self.first - self.last) / full.layers
        return 1 - cut * max(0.0, 1 - (self.heavy + self.recent) * full.prompt / full.length)

    def attended(self, layer, weights, queries, keys):
        self.votes.add(layer, weights, keys)

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        if not self._room:
            self._room = self._dealt(held)
        if held.next == held.prompt or held.layer < self.first or held.layer >= held.layers - self.last:
            return held.live
        heavy, recent = self._room[held.layer]
        late = held.positions >= held.next - recent
        received = self.votes.of(held.layer, held.positions).masked_fill(held.positions < self.sinks, LARGEST)
        return late | heaviest(received, heavy, held.live & ~late)

    def _dealt(self, held):
        """Heavy and recent tokens that each layer may hold, were none of them whole."""
        spread = torch.stack(
            [self.votes.of(layer, held.positions[:1, : held.prompt]).var(1) for layer in range(held.layers)]
        )
        length, whole = held.prompt + 1, self.heavy + self.recent
        shares = (dealt(unevenness(spread, self.compared)) * whole).clamp(LEAST, MOST).tolist()
        return [
            (_floor(length * share * self.heavy / whole), max(1, _floor(length * share * self.recent / whole)))
            for share in shares
        ]

    def merge(self, held, stays, goes):
        alike = nearest([held.read("keys")], stays, goes)
        told = by_head(alike.likeness)
        threshold = alike.likeness.new_tensor(self._moved(held.layer, told))
        joins = (alike.likeness >= threshold[:, None]) & (self.weights != "none")
        meeting, brought = alike.meeting(joins, stays.shape[1]), alike.likeness[joins]
        self._note(held, told, len(brought))
        if meeting is None:
            return None
        if self.weights == "released":
            met = company(meeting).to(brought)
            return Merge(meeting, brought / met[meeting.into], 1 / met)
        return averaged(meeting, brought.exp(), brought.new_full(meeting.targets[0].shape, math.e))

    def _moved(self, layer, alike):
        """The threshold of each head after it heard how alike those that go are to their nearest; the mean of the first
        ones to begin with.

        Infinite, so that none reaches it, where none has gone yet.
        """
        before = self.thresholds.get(layer, [math.inf] * len(alike))
        self.thresholds[layer] = [self._after(threshold, told) for threshold, told in zip(before, alike)]
        return self.thresholds[layer]

    def _after(self, threshold, alike):
        if not alike:
            return threshold
        return fmean(alike) if math.isinf(threshold) else self.memory * threshold + (1 - self.memory) * fmean(alike)

    def _note(self, held, alike, merged):
        """Means over the tokens of a layer that go: how like the nearest, the threshold, the share that is merged."""
        alike = [likeness for told in alike for likeness in told]
        if alike:
            reached = [threshold for threshold in self.thresholds[held.layer] if not math.isinf(threshold)]
            self._seen.setdefault(held.next - held.prompt, []).append(
                (fmean(alike), fmean(reached), merged / len(alike))
            )

    def explain(self, prompt, layers):
        if self._room and not self._shown:
            dealt_out = [
                sum(room) if self.first <= layer < layers - self.last else prompt
                for layer, room in enumerate(self._room)
            ]
            yield Figure(
                "bars",
                "tokens a layer may hold",
                {"labels": [f"layer {layer}" for layer in range(layers)], "values": dealt_out},
            )
            self._shown = True
        for position, told in self._seen.items():
            likeness, threshold, merged = (sum(column) / len(column) for column in zip(*told))
            yield Figure(
                "scalar",
                "how like its nearest a token is that goes",
                {"x": position, "series": {"likeness": likeness, "threshold": threshold}},
            )
            yield Figure(
                "scalar", "share of those that go which is merged", {"x": position, "series": {"merged": merged}}
            )
        self._seen = {}


def by_head(likeness):
    """How like the nearest those are that have one, head by head: of a few tokens means are sooner reckoned one by one.
    """
    return [[cosine for cosine in head if cosine > REMOVED] for head in likeness.tolist()]


def unevenness(spread, compared):
    """How uneven the attention of each layer is, [layers], by its variances [layers, kv_heads], scaled across its heads
    or across the layers.
    """
    across = 1 if compared == "heads" else 0
    low, high = spread.amin(across, keepdim=True), spread.amax(across, keepdim=True)
    return ((spread - low) / (high - low + 1e-6)).mean(1)


def dealt(uneven):
    """What each layer gets of an even share, [layers]: the more, the evener its attention is."""
    return (-uneven).softmax(0) * len(uneven)


def _floor(number):
    return math.floor(number + 1e-9)
