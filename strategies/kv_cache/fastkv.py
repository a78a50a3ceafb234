"""FastKV: later layers read only the prompt tokens that a middle layer selects."""
import math

from playground.algorithms.kv_cache.attention_scores import top_slots
from playground.algorithms.kv_cache.layer_cut_figure import prompt_reading
from playground.algorithms.kv_cache.prompt_compression import PromptCompression
from playground.contract import CutsPrompt, knob


class FastKV(CutsPrompt, PromptCompression):
    """Compute only part of the prompt in the later layers, and compress the cache of each layer as SnapKV does.

    The first layers read the whole prompt. In the last of them the attention of the prompt's last tokens, summed over
    all heads, selects the tokens whose hidden states later layers compute, at their true positions; so the prefill of a
    long prompt costs less. The cache is compressed separately: every layer and KV head keeps the `capacity` best of the
    tokens its layer has read, by its own scores. With rate 1, or depth 1, every layer reads everything and this is
    SnapKV; with a capacity for the whole prompt as well, it is the full cache. Scores are pooled after the sum over a
    group of query heads, the released code pools before; the results agree for avg and can differ for max. The capacity
    is given in tokens, not as a share of the prompt, and the window is always read and kept, even if it exceeds the
    budget. Jo et al. 2025, arXiv 2502.01068.
    """

    name, title, paper, sheet = (
        "fastkv",
        "Part of the prompt for later layers (FastKV)",
        "2502.01068",
        "kv-cache/fastkv",
    )
    guarantee = ("budget_respected", "collapses")

    window: int = knob(8, 1, 64, step=1, help="last tokens of the prompt, whose attention selects; they always stay")
    kernel: int = knob(
        7, 1, 15, step=2, help="neighbouring tokens whose scores are pooled, an odd number; 1 disables pooling"
    )
    pooling: str = knob("max", choices=("avg", "max"), help="how scores of neighbours are pooled")
    depth: float = knob(
        0.5,
        0.0,
        1.0,
        step=0.05,
        help="share of the layers that read the whole prompt, at least one layer; 1: all layers",
    )
    rate: float = knob(
        0.2, 0.05, 1.0, step=0.05, help="share of the prompt tokens that the other layers read; 1: all tokens"
    )

    def __post_init__(self):
        super().__post_init__()
        self._continued = {}  # number of tokens past the cut, by the first layer after it

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {**super().knobs_for_budget(tokens, prompt), "rate": min(1.0, max(cls.rate, tokens / prompt))}

    def cut_layers(self, layers):
        whole = self._whole_layers(layers)
        return [whole] if whole < layers else []

    def _whole_layers(self, layers):
        """Number of layers that read the whole prompt."""
        return max(1, round(self.depth * layers))

    def select_prompt(self, held):
        late = held.positions >= held.prompt - self.window
        scores = self._pooled(held, late).sum(0, keepdim=True)
        selected = late | top_slots(scores, self._continuing(held.prompt) - self.window, ~late)
        self._continued[held.layer + 1] = int(selected.sum())
        return selected

    def _continuing(self, prompt):
        """Number of prompt tokens that the later layers read."""
        return max(min(prompt, self.window), math.floor(prompt * self.rate + 1e-9))

    def share(self, held):
        return self.capacity - self.window

    def budget(self, generated):
        return self.capacity + generated

    def expected_share(self, full):
        whole = self._whole_layers(full.layers)
        later = (full.layers - whole) * min(self.capacity, self._continuing(full.prompt))
        held = whole * min(self.capacity, full.prompt) + later
        return (held / full.layers + full.generated) / full.length

    def explain(self, prompt, layers):
        if self._continued:
            yield from prompt_reading(prompt, layers, self._continued)
            self._continued = {}
