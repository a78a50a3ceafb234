"""Prompt compression put together from parts: a score, chunks, and budgets that heads share."""
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from playground.algorithms.kv_cache.head_budgets import InChunks, SharedBudgets, chunk_means, shared_out
from playground.algorithms.kv_cache.prompt_compression import POOLS
from playground.contract import knob

SCORES = ("attention", "key_diff", "key_norm")


class ComposedKV(InChunks, SharedBudgets):
    """Compress the prompt once by any score, in whole chunks, with a budget per layer for which its heads compete.

    The parts are those of other policies, wrapped around each other as in kvpress: the score of a token is the
    attention of the last `window` prompt tokens (SnapKV), how much its key differs from the mean of all keys (KeyDiff),
    or how short its key is; the score of a chunk is the mean of its tokens (ChunkKV); each head keeps a share alpha of
    an even budget by its own scores, and the rest goes to the best chunks of all heads together (AdaKV). By attention
    chunk = 1 is AdaKV, alpha = 1 ChunkKV, and both SnapKV. Generated tokens are not evicted. kvpress: Devoto et
    al. 2025, arXiv 2510.00636; KeyDiff: Park et al. 2025, arXiv 2504.15364.
    """

    name, title, paper, sheet = "composed_kv", "Score, chunks and head budgets", "2510.00636", "kv-cache/KVPRESS"
    guarantee, sure = ("collapses",), "high"

    score: str = knob("key_diff", choices=SCORES, help="what a token is worth: attention, an unusual key, a short key")
    chunk: int = knob(4, 1, 64, step=1, help="tokens per chunk; 1 keeps or evicts single tokens")
    alpha: float = knob(0.2, 0.0, 1.0, step=0.05, help="share of an even budget that every head keeps; 1: even")
    kernel: int = knob(1, 1, 15, step=2, help="neighbouring tokens over which scores are pooled first, an odd number")

    def wants_attention(self, position, prompt):
        return self.score == "attention" and super().wants_attention(position, prompt)

    def retain(self, held):
        if held.next < held.prompt:
            return held.live
        late = held.positions >= held.prompt - self.window
        scores = self._scores(held, late)
        early = (held.live & ~late).expand_as(scores)
        number = held.positions.expand_as(scores).clamp(min=0) // self.chunk
        means, there = chunk_means(scores, number, early)
        chosen = shared_out(means, there, self.chunks, self.alpha)
        return self.note_kept(held.layer, late | chosen.gather(1, number) & early)

    def _scores(self, held, late: Tensor) -> Tensor:
        """Scores before the window, pooled along the text, [kv_heads, slots]."""
        if self.score == "attention":
            return self._pooled(held, late)
        keys = held.read("keys")
        found = -keys.norm(dim=-1) if self.score == "key_norm" else unusual(keys, held.live)
        return POOLS[self.pooling](found, self.kernel, 1, self.kernel // 2)


def unusual(keys: Tensor, live: Tensor) -> Tensor:
    """How much each key [kv_heads, slots, d] differs in direction from the mean of the live ones, [kv_heads, slots]."""
    directions = normalize(keys, dim=-1).masked_fill(~live[..., None], 0.0)
    return -cosine_similarity(keys, directions.sum(1, keepdim=True), dim=-1)
