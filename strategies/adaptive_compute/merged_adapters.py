"""Adapters of several tasks, averaged into one."""
import torch

from playground.algorithms.adaptive_compute.adapter_experts import AdapterExperts


class MergedAdapters(AdapterExperts):
    """The mean of what all adapters would add, the same for every token: the baseline of routing among them.

    It is the mean of the products B A, not the product of mean matrices. With `only` naming one adapter it is that
    adapter. The adapters are those of `python -m playground fit phatgoose`. Without a fit nothing is added.
    """

    name, title, paper, sheet = "merged_adapters", "Averaged adapters", "baseline", "weights/routing-experts"

    def weigh(self, layer, name, rows):
        return torch.full((len(rows), len(self.experts)), 1 / len(self.experts), device=rows.device)
