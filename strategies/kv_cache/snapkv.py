"""The end of the prompt says which of its tokens matter."""
from playground.algorithms.kv_cache.prompt_compression import Snapshot


class SnapKV(Snapshot):
    """Cut the prompt once, to the tokens its last few tokens attend to; whatever is generated afterwards stays.

    The last `window` tokens of the prompt vote with their attention weights, summed over the window and over the query
    heads of a group. The votes are smoothed along the text, so that tokens stay together with their neighbours, and
    each layer and KV head keeps the best ones next to the window itself. Pooling comes after the sum over a group here;
    with avg the order makes no difference, with max it can. Li et al. 2024, arXiv 2404.14469.
    """

    name, title, paper, sheet = "snapkv", "Prompt snapshot (SnapKV)", "2404.14469", "kv-cache/kv-baselines"
    guarantee = ("budget_respected", "collapses")

    def share(self, held):
        return self.capacity - self.window

    def budget(self, generated):
        return self.capacity + generated
