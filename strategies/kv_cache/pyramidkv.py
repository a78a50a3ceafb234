"""A prompt snapshot that is wide in the first layers and narrow in the last."""
from playground.algorithms.kv_cache.prompt_compression import Snapshot
from playground.contract import knob
from playground.events import Figure


class PyramidKV(Snapshot):
    """Cut the prompt once, as SnapKV does, but let the first layers keep many of its tokens and the last layers few.

    First layers spread their attention over the text and last ones gather it on a few tokens, so the places are dealt
    out along a straight line from layer to layer: the last one gets 1/beta of an even share, the first what the last
    one went without. No layer gets more than the prompt has, and what it cannot use goes to the other end. A layer
    keeps `capacity` on average, so memory is SnapKV's; beta = 1 is SnapKV itself. What is generated stays. Cai et al.
    2024, arXiv 2406.02069.
    """

    name, title, paper, sheet = "pyramidkv", "Pyramid of snapshots (PyramidKV)", "2406.02069", "kv-cache/kv-baselines"
    guarantee = ("budget_respected", "collapses")

    beta: int = knob(
        20, 1, 40, step=1, help="an even share, divided by what the last layer gets; 1 gives all layers the same"
    )

    def __post_init__(self):
        super().__post_init__()
        self._shown = False

    def share(self, held):
        return self._early(held.layer, held.layers, held.prompt)

    def _early(self, layer, layers, prompt):
        """How many tokens before the window a layer keeps."""
        even = self.capacity - self.window
        most = min(self._widest(), max(even, prompt - self.window))
        down = layer / (layers - 1) if layers > 1 else 0.5
        return round(most - down * 2 * (most - even))

    def _widest(self):
        """Tokens before the window that the first layer of a long prompt keeps."""
        even = self.capacity - self.window
        return 2 * even - even / self.beta

    def explain(self, prompt, layers):
        if not self._shown:
            kept = [min(prompt, self._early(layer, layers, prompt) + self.window) for layer in range(layers)]
            yield Figure(
                "bars", "prompt tokens kept", {"labels": [f"layer {layer}" for layer in range(layers)], "values": kept}
            )
        self._shown = True

    def promise(self, full):
        return min(1.0, (self.capacity + full.generated) / full.length)

    def budget(self, generated):
        return self.window + round(self._widest()) + generated
