"""Prompt compression by how unlike the others a key is, and by attention in both directions."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from playground.algorithms.kv_cache.attention_scores import top_slots
from playground.contract import ReadsParts, ReadsQueries, knob
from playground.errors import Refusal

JITTER, TINY = 1e-2, 1e-6  # added to the matrix that is inverted; least standard deviation


class Compactor(ReadsParts, ReadsQueries):
    """Compress the prompt once, without knowing a question: keep tokens whose keys are unlike the others, and those
    that their neighbours in a chunk attend to, also from before.

    The first score is the leverage of a key before the rotary embedding, after the mean is subtracted, in a random
    projection to `sketch` numbers: how much of the space it spans alone. The second lets all tokens of a chunk attend
    to each other without a mask and without the usual scale, sums what each receives, times the norm of its value, and
    averages three neighbours; an unfinished chunk is filled up with zeros, as in NVIDIA's kvpress, whose formulas these
    are. Both are standardised over the heads of a layer and added, the first times `blending`, for which kvpress takes
    the evicted share. The first and last tokens always stay, and generated ones are not evicted. Chari and Van Durme
    2025, arXiv 2507.08143.
    """

    name, title, paper, sheet = "compactor", "Leverage and attention (Compactor)", "2507.08143", "kv-cache/kvzap"
    guarantee, new_in = ("budget_respected", "collapses"), "2026"
    prompt_only = True

    capacity: int = knob(64, 2, 2048, step=1, help="prompt tokens retained, the first and last ones included")
    first: int = knob(8, 0, 64, step=1, help="first tokens of the prompt, always retained")
    last: int = knob(4, 0, 64, step=1, help="last tokens of the prompt, always retained")
    chunk: int = knob(256, 1, 2048, step=1, help="tokens that attend to each other")
    sketch: int = knob(48, 1, 256, step=1, help="numbers to which a key is projected")
    blending: float = knob(0.35, 0.0, 4.0, step=0.05, help="weight of the leverage; 0: attention alone")

    def __post_init__(self):
        self._queries: dict[int, Tensor] = {}  # of the prompt, by layer

    def check(self):
        if self.first + self.last > self.capacity:
            raise Refusal(
                f"capacity is {self.capacity}, and {self.first} first and {self.last} last tokens always stay: raise "
                "capacity.",
                "capacity",
            )

    @classmethod
    def knobs_for_budget(cls, tokens: int, prompt: int) -> dict[str, int]:
        return {"capacity": tokens, "first": min(cls.first, tokens // 2), "last": min(cls.last, tokens // 4)}

    def begin(self, parts):
        self._parts = parts

    def observe_queries(self, layer, query_states):
        seen = [self._queries[layer]] if layer in self._queries else []
        self._queries[layer] = torch.cat([*seen, query_states], 2)

    def retain(self, held):
        if held.next < held.prompt or held.positions.shape[1] - (held.next - held.prompt) <= self.capacity:
            return held.live
        middle = (held.positions >= self.first) & (held.positions < held.prompt - self.last) & held.live
        count = self.capacity - self.first - self.last
        return held.live & ~middle | top_slots(self.scores(held), count, middle)

    def scores(self, held) -> Tensor:
        """[kv_heads, slots], of the prompt's tokens between the first and the last ones; 0 of others.

        It is asked for once, when the prompt has been read and nothing is evicted yet.
        """
        part = slice(self.first, held.prompt - self.last)
        keys, values = held.read("keys")[:, part], held.read("values")[:, part]
        blank = keys.new_zeros(len(keys), 1, held.prompt, keys.shape[-1])  # of layers that report no queries
        queries = self._queries.pop(held.layer, blank)[:, :, part].to(keys)
        positions = held.positions[0, part]
        leverage = leverages(self._parts.rotate_back(keys, positions), self.projection(held.layer, keys))
        attended = attended_in_chunks(queries, keys, self.chunk).mean(1) * values.norm(dim=-1)
        found = self.blending * standardised(leverage) + standardised(avg_pool1d(attended, 3, 1, 1))
        return pad(found, (self.first, held.positions.shape[1] - self.first - found.shape[1]))

    def projection(self, layer: int, keys: Tensor) -> Tensor:
        """Random numbers [kv_heads, d, sketch], the same in every run."""
        chance = torch.Generator().manual_seed(layer)
        drawn = torch.randn(len(keys), keys.shape[-1], self.sketch, generator=chance)
        return drawn.to(keys) * self.sketch**-0.5

    def rests(self, slots: int, length: int, prompt: int) -> bool:
        return slots <= self.capacity

    def budget(self, generated):
        return self.capacity + generated


def leverages(keys: Tensor, projection: Tensor) -> Tensor:
    """How much of the space of the rows [heads, n, d] each spans, [heads, n], after a projection [heads, d, k]."""
    rows = (keys - keys.mean(1, keepdim=True)) @ projection
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    products = rows.transpose(1, 2) @ rows
    products.diagonal(dim1=1, dim2=2).add_(JITTER)
    return (rows * torch.linalg.solve(products, rows.transpose(1, 2)).transpose(1, 2)).sum(-1).clamp(min=0)


def attended_in_chunks(queries: Tensor, keys: Tensor, chunk: int) -> Tensor:
    """What each key [heads, n, d] receives of the queries [heads, group, n, d] of its chunk, [heads, group, n]."""
    count = keys.shape[1]
    missing = -count % chunk
    queries, keys = (pad(part, (0, 0, 0, missing)).unflatten(-2, (-1, chunk)) for part in (queries, keys))
    received = (queries @ keys[:, None].transpose(-1, -2)).softmax(-1).sum(-2)
    return received.flatten(-2)[..., :count]


def standardised(scores: Tensor) -> Tensor:
    """With mean 0 and standard deviation 1 over all heads."""
    return (scores - scores.mean()) / scores.std().clamp(min=TINY)
