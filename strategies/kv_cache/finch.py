"""Finch: the question at the end of the prompt selects what stays of each chunk before it."""
import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import AttentionScores, top_slots
from playground.contract import ReadsAttention, ReadsInChunks, ReadsParts, knob
from playground.errors import Refusal


class Finch(ReadsInChunks, ReadsAttention, ReadsParts):
    """Read the prompt in chunks, and keep of each what the question at the end of the prompt attends to.

    After every chunk the question is read and discarded; the tokens of the chunk that receive most of its attention
    stay, in proportion to the length of the chunk, and the next chunk reads only these. So a context may be far longer
    than what is held at any time. Attention is multiplied by the number of tokens that a row sees, since early rows
    spread theirs over fewer. The question is the last `question` tokens of the prompt and always stays. With `rotate`
    the kept keys move together, as if nothing had been between them. Scores are summed over the query heads of a group,
    each KV head selects for itself. Which of the earlier tokens compete again with a later chunk is not clear from the
    sources; here none do. Generated tokens are not evicted. A capacity for the whole prompt is the full cache. Corallo
    and Papotti 2024, arXiv 2408.00167.
    """

    name, title, paper, sheet = "finch", "Guided by the question (Finch)", "2408.00167", "kv-cache/finch"
    guarantee = ("budget_respected", "collapses")
    reconstruction, sure = True, "medium"
    prompt_only = True

    capacity: int = knob(64, 2, 2048, step=1, help="prompt tokens that stay, the question included")
    question: int = knob(16, 1, 512, step=1, help="last tokens of the prompt, which select the others")
    chunk: int = knob(128, 8, 1024, step=8, help="tokens that are read before the next selection")
    rotate: bool = knob(True, help="close the gaps: kept keys move to neighbouring positions")

    def __post_init__(self):
        self.attention = AttentionScores()
        self._settled = 0  # tokens of the prompt that were selected from

    def check(self):
        if self.question >= self.capacity:
            raise Refusal(f"The question takes {self.question} tokens, and only {self.capacity} stay: raise capacity.",
                          "capacity")

    @property
    def prefill_chunk(self):
        return self.chunk

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"capacity": tokens, "question": min(cls.question, tokens // 2)}

    def begin(self, parts):
        self._parts = parts

    def chunk_probe(self, text, read):
        return text[-self.question:] if len(text) > self.capacity else []

    def wants_attention(self, position, prompt):
        return prompt - self.question <= position < prompt

    def observe_attention(self, layer, weights, query_positions, key_positions):
        keys, queries = key_positions[:, None], query_positions[:, None]
        before = ((keys >= 0) & (keys < queries)).sum(-1)  # slots before each row, [1 or kv_heads, n]
        before = before + (query_positions - self.text_length).clamp(min=0)  # rows of the question that are discarded
        self.attention.add(layer, weights * before[..., None], key_positions, self.text_length)

    def retain_all(self, held):
        kept = super().retain_all(held)
        if held[0].moment in ("chunk", "prefill"):
            self._settled = held[0].next
        return kept

    def retain(self, held):
        if held.moment not in ("chunk", "prefill") or held.prompt <= self.capacity:
            return held.live
        context = held.prompt - self.question
        stays = (held.positions < self._settled) | (held.positions >= context)
        share = self._budget_after(held.next, context) - self._budget_after(self._settled, context)
        scores = self.attention.of(held.layer, held.positions, held.next)
        best = top_slots(scores.expand(len(held.read("keys")), -1), share, held.live & ~stays)
        kept = held.live & (stays | best)
        if self.rotate and not bool(kept.all()):
            self._close_gaps(held, kept)
        return kept

    def _budget_after(self, read: int, context: int) -> int:
        """Tokens that stay of the first `read` of the context."""
        return (self.capacity - self.question) * min(read, context) // context if context else 0

    def _close_gaps(self, held, kept: Tensor) -> None:
        """Rotate keys to the positions they have once evicted slots are gone; the last one keeps its position."""
        count = kept.shape[1]
        later = kept.flip(1).cumsum(1).flip(1)  # kept slots from each one on
        old = torch.arange(count, 0, -1, device=kept.device)  # slots from each one on
        moves = (old - later).masked_fill(~kept, 0)
        held.write("keys", self._parts.rotate(held.read("keys"), moves).clone())

    def budget(self, generated):
        return self.capacity + generated
