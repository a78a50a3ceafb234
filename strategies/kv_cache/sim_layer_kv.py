"""Small caches for lazy layers."""
from playground.algorithms.kv_cache.attention_scores import AttentionScores
from playground.contract import DecidesByHead, ReadsAttention, knob
from playground.events import Figure


class SimLayerKV(ReadsAttention, DecidesByHead):
    """Find the lazy layers, which attend almost only to the first and the most recent tokens, and cache only those
    there.

    A layer is lazy if the last `window` tokens of the prompt pay more than a share `threshold` of their attention,
    averaged over heads, to the first `sinks` and the last `recent` tokens of the prompt. Its cache becomes a window
    with sinks; all other layers keep everything. Saves memory at little loss where layers differ in how far back they
    attend. threshold = 1 keeps everything. Zhang et al. 2024, arXiv 2410.13846.
    """

    name, title, paper, sheet = "sim_layer_kv", "Lazy layers (SimLayerKV)", "2410.13846", "kv-cache/sim-layer-kv"
    guarantee = ("collapses",)

    threshold: float = knob(0.8, 0.0, 1.0, step=0.01, help="share of attention above which a layer is lazy; 1: none is")
    sinks: int = knob(4, 0, 64, step=1, help="first tokens that a lazy layer keeps")
    recent: int = knob(32, 1, 2048, step=1, help="most recent tokens that a lazy layer keeps")
    window: int = knob(16, 1, 128, step=1, help="last prompt tokens, whose attention decides which layers are lazy")

    def __post_init__(self):
        self.attention, self._near = AttentionScores(), {}
        self._shown = False

    def wants_attention(self, position, prompt):
        return prompt - self.window <= position < prompt

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.add(layer, weights, key_positions, self.text_length)

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        if held.layer not in self._near:
            self._near[held.layer] = self._share(held)
        if not self.is_lazy(held.layer):
            return held.live
        return held.live & ((held.positions < self.sinks) | (held.positions >= held.next - self.recent))

    def rests(self, slots, length, prompt):
        return length <= self.sinks + self.recent or not any(map(self.is_lazy, self._near))

    def is_lazy(self, layer: int) -> bool:
        return self.threshold < 1 and self._near[layer] > self.threshold

    def _share(self, held) -> float:
        """Share of the attention of the window that goes to the first and the last tokens of the prompt."""
        received = self.attention.of(held.layer, held.positions, held.next)
        near = (held.positions < self.sinks) | (held.positions >= held.prompt - self.recent)
        return float((received * near).sum() / received.sum())

    def explain(self, prompt, layers):
        if self._near and not self._shown:
            self._shown = True
            labels = [f"layer {layer}{', lazy' if self.is_lazy(layer) else ''}" for layer in sorted(self._near)]
            shares = {"labels": labels, "values": [self._near[layer] for layer in sorted(self._near)]}
            yield Figure("bars", "share of attention on the first and last tokens", shares)
