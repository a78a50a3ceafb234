"""SnapKV: prompt compression by the attention of the last prompt tokens."""
from playground.algorithms.kv_cache.prompt_compression import PromptCompression


class SnapKV(PromptCompression):
    """Compress the prompt once, to the tokens that its last few tokens attend to; generated tokens are not evicted.

    Scores are the attention weights of the last `window` prompt tokens, summed over the window and over the query heads
    of a group, and pooled along the text so that neighbouring tokens stay together. Each layer and KV head keeps the
    tokens with the largest scores and the window. Pooling follows the sum over a group here; for avg the order makes no
    difference, for max it can. Li et al. 2024, arXiv 2404.14469.
    """

    name, title, paper, sheet = "snapkv", "Prompt snapshot (SnapKV)", "2404.14469", "kv-cache/kv-baselines"
    guarantee = ("budget_respected", "collapses")

    def share(self, held):
        return self.capacity - self.window

    def budget(self, generated):
        return self.capacity + generated
