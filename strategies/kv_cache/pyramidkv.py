"""PyramidKV: prompt compression with larger budgets in earlier layers."""
from playground.algorithms.kv_cache.prompt_compression import PromptCompression
from playground.contract import knob
from playground.events import Figure


class PyramidKV(PromptCompression):
    """Compress the prompt once, as SnapKV does, but keep more of its tokens in the first layers than in the last.

    Early layers spread their attention over the text and late ones concentrate it on a few tokens, so budgets decrease
    linearly from layer to layer: the last layer gets 1/beta of an even share, the first the difference on top of its
    own. No budget exceeds the prompt; the surplus goes to the other end. As in the authors' code, all layers get the
    same budget if the prompt is shorter than twice `capacity - window`. A layer keeps `capacity` tokens on average, so
    memory is that of SnapKV; the authors round the step between layers down and therefore keep more. beta = 1 is
    SnapKV. Generated tokens are not evicted. Cai et al. 2024, arXiv 2406.02069.
    """

    name, title, paper, sheet = "pyramidkv", "Pyramid of snapshots (PyramidKV)", "2406.02069", "kv-cache/kv-baselines"
    guarantee = ("budget_respected", "collapses")

    beta: int = knob(
        20, 1, 40, step=1, help="ratio of an even share to the last layer's budget; 1 gives all layers the same"
    )

    def __post_init__(self):
        super().__post_init__()
        self._shown = False

    def share(self, held):
        return self._early(held.layer, held.layers, held.prompt)

    def _early(self, layer, layers, prompt):
        """Number of tokens before the window that a layer keeps."""
        even = self.capacity - self.window
        if prompt < 2 * even:
            return even
        most = min(self._widest(), max(even, prompt - self.window))
        down = layer / (layers - 1) if layers > 1 else 0.5
        return round(most - down * 2 * (most - even))

    def _widest(self):
        """Number of tokens before the window that the first layer keeps of a long prompt."""
        even = self.capacity - self.window
        return 2 * even - even / self.beta

    def explain(self, prompt, layers):
        if not self._shown:
            kept = [min(prompt, self._early(layer, layers, prompt) + self.window) for layer in range(layers)]
            yield Figure(
                "bars", "prompt tokens kept", {"labels": [f"layer {layer}" for layer in range(layers)], "values": kept}
            )
        self._shown = True

    def expected_share(self, full):
        return min(1.0, (self.capacity + full.generated) / full.length)

    def budget(self, generated):
        return self.window + round(self._widest()) + generated
