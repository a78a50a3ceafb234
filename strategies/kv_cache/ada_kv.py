"""Prompt compression with a budget shared by the heads of a layer."""
from playground.algorithms.kv_cache.head_budgets import SharedBudgets, shared_out
from playground.contract import knob


class AdaKV(SharedBudgets):
    """Compress the prompt once, with one budget per layer for which its heads compete.

    Each head keeps a share alpha of an even budget by its own scores, those of SnapKV. The rest goes to the best tokens
    of all heads together, so that heads with scattered attention keep more than those that attend to a few tokens. The
    layer's total is that of SnapKV. Useful where heads differ: an even budget is too small for some and larger than
    needed for others. What a head evicts is freed; while a layer is read, its heads are spread out to equal lengths, so
    that one product serves them all. alpha = 1 is SnapKV. Generated tokens are not evicted. Feng et al. 2024, arXiv
    2407.11550.
    """

    name, title, paper, sheet = "ada_kv", "Budgets by head (AdaKV)", "2407.11550", "kv-cache/ada-kv"
    guarantee = ("collapses",)

    alpha: float = knob(0.2, 0.0, 1.0, step=0.05, help="share of an even budget that every head keeps; 1 is SnapKV")

    def share(self, held):
        return self.capacity - self.window

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        late = held.positions >= held.prompt - self.window
        scores = self._pooled(held, late)
        early = (held.live & ~late).expand_as(scores)
        chosen = shared_out(scores, early, self.share(held), self.alpha)
        return late | self.note_kept(held.layer, chosen)
