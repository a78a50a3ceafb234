"""Prompt compression that weighs attention by what the values add to the hidden states."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import top_slots
from playground.algorithms.kv_cache.prompt_compression import PromptCompression
from playground.contract import ReadsParts, knob

EPSILON = 1e-4  # added to the attention of a row, so that a large value counts even without any


class CriticalKV(ReadsParts, PromptCompression):
    """Compress the prompt once; half of the budget goes by attention, the rest by attention times the size of the
    projected value.

    The output of attention changes by an evicted token's weight times its value after the output projection, so tokens
    with large projected values are worth more than their attention says. The bound of the authors holds if the tokens
    with most attention stay, so a first stage selects these with a `first` share of the budget, by the scores of
    SnapKV. The second stage ranks the others by (attention + 0.0001) times the L1 norm of the projected value, averaged
    over the query heads of a group. first = 1 is SnapKV. Generated tokens are not evicted. Feng et al. 2025, arXiv
    2502.03805.
    """

    name, title, paper, sheet = "critical_kv", "Output perturbation (CriticalKV)", "2502.03805", "kv-cache/critical-kv"
    guarantee = ("budget_respected", "collapses")

    first: float = knob(0.5, 0.0, 1.0, step=0.05, help="share of the budget that goes by attention alone; 1 is SnapKV")

    def begin(self, parts):
        self._parts = parts

    def share(self, held):
        return self.capacity - self.window

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        # late tokens are never evicted, so the fullest head tells how many early ones there are: nothing is read
        if held.positions.shape[1] - (held.next - max(0, held.prompt - self.window)) <= self.share(held):
            return held.live
        late = held.positions >= held.prompt - self.window
        early, pooled = held.live & ~late, self._pooled(held, late)
        sizes = self._value_sizes(held)
        rows = min(self.window, held.prompt) * sizes[1]
        best = top_slots(pooled, int(self.first * self.share(held) + 1e-9), early)
        weighed = (pooled / rows + EPSILON) * sizes[0].to(pooled)
        return late | best | top_slots(weighed, self.share(held) - int(best.sum(-1).max()), early & ~best)

    def _value_sizes(self, held) -> tuple[Tensor, int]:
        """L1 norm of each value after the output projection, [kv_heads, slots], averaged over the query heads of a
        group, and their number.
        """
        values = held.read("values")
        output = self._parts.attention_projections(held.layer).output.to(values)
        heads = output.unflatten(1, (len(values), -1, values.shape[2]))  # [width, kv_heads, group, d]
        sizes = torch.zeros(values.shape[:2], dtype=values.dtype, device=values.device)
        for member in heads.unbind(2):
            sizes += torch.einsum("hnd,mhd->hnm", values, member).abs().sum(-1)
        return sizes / heads.shape[2], heads.shape[2]

    def budget(self, generated):
        return self.capacity + generated
