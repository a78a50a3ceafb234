"""Half of the layers read the whole prompt, the others only what the first half found worth it."""
import math

from playground.algorithms.kv_cache.attention_scores import heaviest
from playground.algorithms.kv_cache.layer_cut_figure import staircase
from playground.algorithms.kv_cache.prompt_compression import Snapshot
from playground.contract import knob


class FastKV(Snapshot):
    """Let only a part of the prompt's tokens go on behind a middle layer, and cut what each layer has read as SnapKV
    does.

    The first layers read the whole prompt. In the last of them the end of the prompt votes, over all heads, and behind
    it only the states of the tokens with the most votes are computed any further, each at its true place in the text:
    so a long prompt costs less to read. What stays in the cache is settled apart from that: every layer and KV head
    keeps the `capacity` best of the tokens its layer has read, by votes of its own. With rate 1, or depth 1, every
    layer reads everything and this is SnapKV; with room for the whole prompt besides, it is a full cache. Votes are
    pooled after the sum over a group of query heads, where the released code pools before; for avg that is the same,
    for max it can differ. Room is given in tokens, not as a share of the prompt, and the window goes on and stays even
    where it is more than that. Jo et al. 2025, arXiv 2502.01068.
    """

    name, title, paper, sheet = (
        "fastkv",
        "Part of the prompt for later layers (FastKV)",
        "2502.01068",
        "kv-cache/fastkv",
    )
    guarantee = ("budget_respected", "collapses")

    window: int = knob(8, 1, 64, step=1, help="last tokens of the prompt, which vote, go on and stay")
    kernel: int = knob(
        7, 1, 15, step=2, help="neighbouring tokens whose votes are pooled, an odd number; 1 pools nothing"
    )
    pooling: str = knob("max", choices=("avg", "max"), help="how votes of neighbours are pooled")
    depth: float = knob(
        0.5,
        0.0,
        1.0,
        step=0.05,
        help="share of the layers that read the whole prompt, one layer at least; 1 lets all of them",
    )
    rate: float = knob(
        0.2, 0.05, 1.0, step=0.05, help="share of the prompt's tokens that the other layers read; 1 lets all go on"
    )

    def __post_init__(self):
        super().__post_init__()
        self._went_on = {}  # tokens that did, by the first layer to read no others

    @classmethod
    def holding(cls, tokens, prompt):
        return {**super().holding(tokens, prompt), "rate": min(1.0, max(cls.rate, tokens / prompt))}

    def cuts(self, layers):
        whole = self._whole_layers(layers)
        return [whole] if whole < layers else []

    def _whole_layers(self, layers):
        """Layers that read the whole prompt."""
        return max(1, round(self.depth * layers))

    def onward(self, held):
        late = held.positions >= held.prompt - self.window
        votes = self._pooled(held, late).sum(0, keepdim=True)
        chosen = late | heaviest(votes, self._going_on(held.prompt) - self.window, ~late)
        self._went_on[held.layer + 1] = int(chosen.sum())
        return chosen

    def _going_on(self, prompt):
        """Tokens of a prompt that the later layers read."""
        return max(min(prompt, self.window), math.floor(prompt * self.rate + 1e-9))

    def share(self, held):
        return self.capacity - self.window

    def budget(self, generated):
        return self.capacity + generated

    def promise(self, full):
        whole = self._whole_layers(full.layers)
        held = whole * min(self.capacity, full.prompt) + (full.layers - whole) * min(
            self.capacity, self._going_on(full.prompt)
        )
        return (held / full.layers + full.generated) / full.length

    def explain(self, prompt, layers):
        if self._went_on:
            yield from staircase(prompt, layers, self._went_on)
            self._went_on = {}
