"""Prompt compression in whole chunks."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.head_budgets import InChunks, chunk_means
from playground.contract import knob


class ChunkKV(InChunks):
    """Compress the prompt once, keeping or evicting chunks of neighbouring tokens as a whole.

    The score of a chunk is the mean attention that the last `window` prompt tokens pay to its tokens; each layer and KV
    head keeps the best chunks that fit into `capacity`, and the window. Useful where a fact is spread over several
    tokens, of which single-token rules keep only some. chunk = 1 is SnapKV. Generated tokens are not evicted. Not
    implemented: sharing the selection between layers. Liu et al. 2025, arXiv 2502.00299.
    """

    name, title, paper, sheet = "chunk_kv", "Chunks of the prompt (ChunkKV)", "2502.00299", "kv-cache/chunk-kv"
    guarantee = ("budget_respected", "collapses")

    chunk: int = knob(8, 1, 64, step=1, help="tokens per chunk; 1 is SnapKV")
    kernel: int = knob(1, 1, 15, step=2, help="neighbouring tokens over which scores are pooled first, an odd number")

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        late = held.positions >= held.prompt - self.window
        scores = self._pooled(held, late)
        early = (held.live & ~late).expand_as(scores)
        return late | self.best_chunks(scores, held.positions.expand_as(scores), early)

    def best_chunks(self, scores: Tensor, positions: Tensor, early: Tensor) -> Tensor:
        """The slots of the best chunks of each head among `early`, all [kv_heads, slots]."""
        number = positions.clamp(min=0) // self.chunk
        means, there = chunk_means(scores, number, early)
        means = means.masked_fill(~there, -1.0)
        order = means.argsort(dim=1, descending=True, stable=True)[:, :self.chunks]
        chosen = torch.zeros_like(means, dtype=torch.bool).scatter(1, order, True)
        return chosen.gather(1, number) & early

    def budget(self, generated):
        return self.capacity + generated
