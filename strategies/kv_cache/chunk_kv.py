"""Prompt compression in whole chunks."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.head_budgets import chunk_means
from playground.algorithms.kv_cache.prompt_compression import PromptCompression
from playground.contract import knob
from playground.errors import Refusal


class ChunkKV(PromptCompression):
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

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        knobs = super().knobs_for_budget(tokens, prompt)
        return {**knobs, "chunk": min(cls.chunk, tokens - knobs["window"])}

    def check(self):
        super().check()
        if self.capacity - self.window < self.chunk:
            raise Refusal(
                f"capacity leaves {self.capacity - self.window} tokens before the window, less than a chunk of "
                f"{self.chunk}: raise capacity.",
                "capacity",
            )

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
        order = means.argsort(dim=1, descending=True, stable=True)[:, :(self.capacity - self.window) // self.chunk]
        chosen = torch.zeros_like(means, dtype=torch.bool).scatter(1, order, True)
        return chosen.gather(1, number) & early

    def share(self, held):
        return (self.capacity - self.window) // self.chunk * self.chunk

    def budget(self, generated):
        return self.capacity + generated
