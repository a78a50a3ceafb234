"""An independent implementation of UNComp's stages."""
from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from pairs import network
from torch import Tensor
from transformers import AttentionInterface

from support.budget_policies import best
from support.eviction import LivePositions

BY_HAND = ("llama", "qwen3", "gpt_neox", "gpt2")
UNCOMP_TIGHT = {"high": 12, "low": 7, "window": 3, "kernel": 3}


@dataclass
class WholeText:
    """Greedy decoding without a cache. `rule` gives what the prompt's rows see, and after each forward which tokens
    of the text stay live.
    """

    architecture: str
    rule: object
    seen: dict = field(default_factory=dict)  # by layer: what each row saw, [kv_heads, rows, rows]
    # by layer: positions that later rows may see, by head
    live: dict = field(default_factory=lambda: defaultdict(list))
    queries: dict = field(default_factory=dict)  # of the prompt, by layer, [heads, n, d]

    @torch.inference_mode()
    def write(self, prompt: list[int], length: int) -> tuple[list[int], list[LivePositions]]:
        AttentionInterface.register("whole_text", self._attention)
        library = network(self.architecture)
        library.set_attn_implementation("whole_text")
        ids, held = list(prompt), []
        while len(held) < length:
            ids.append(int(library(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            held.append([[set(head) for head in self.live[layer]] for layer in sorted(self.live)])
        return ids[len(prompt):], held

    def _attention(self, module, query, key, value, mask, scaling, **others):
        layer, q, (heads, count) = module.layer_idx, query[0], key.shape[1:3]
        k, v = (part[0].repeat_interleave(len(q) // heads, 0) for part in (key, value))
        causal = torch.ones(count, count).tril().bool()
        scores = (q @ k.mT * scaling).masked_fill(~causal, -math.inf)
        if layer not in self.live:
            self.queries[layer] = q
        seen = self._seen(layer, scores.softmax(-1).unflatten(0, (heads, -1)).sum(1), causal)
        spread = scores.masked_fill(~seen.repeat_interleave(len(q) // heads, 0), -math.inf).softmax(-1)
        self._settle(layer, scores.softmax(-1), spread, heads)
        return (spread @ v).transpose(0, 1)[None], None

    def _seen(self, layer: int, full: Tensor, causal: Tensor) -> Tensor:
        """What each row sees, [kv_heads, n, n], from its mask and attention, summed over a group."""
        heads, count = len(full), len(causal)
        seen = torch.zeros_like(full, dtype=torch.bool)
        if layer not in self.live:
            seen |= self.rule.reads(full) & causal
        else:
            seen[:, :-1, :-1] = self.seen[layer]
            for head in range(heads):
                seen[head, -1, [*self.live[layer][head], count - 1]] = True
        self.seen[layer] = seen
        return seen

    def _settle(self, layer: int, full: Tensor, spread: Tensor, heads: int) -> None:
        count = full.shape[1]
        first = count - 1 if layer in self.live else 0
        live = (
            [set(range(count)) for _ in range(heads)]
            if not first
            else [{*head, count - 1} for head in self.live[layer]]
        )
        rows = (spread if self.rule.one_way and first else full).unflatten(0, (heads, -1)).sum(1)[:, first:]
        self.live[layer] = [
            self.rule.stays(self, layer, head, live[head], rows[head].tolist()) for head in range(heads)
        ]


@dataclass
class Latest:
    """The last rows of a layer and head, a dict of weights by position each."""

    rows: dict = field(default_factory=lambda: defaultdict(list))

    def hear(self, at: tuple[int, int], rows: list[list[float]], live: set[int], most: int) -> dict[int, float]:
        self.rows[at] = [*self.rows[at], *(dict(enumerate(row)) for row in rows)][-most:]
        return {p: sum(row.get(p, 0.0) for row in self.rows[at]) for p in live}


@dataclass
class UNCompByHand:
    high: int = 12
    low: int = 7
    window: int = 3
    kernel: int = 3
    pooling: str = "max"
    eigenvalues: int = 32
    one_way: bool = True
    latest: Latest = field(default_factory=Latest)

    def reads(self, full: Tensor) -> Tensor:
        return torch.ones_like(full, dtype=torch.bool)

    def stays(self, text: WholeText, layer: int, head: int, live: set[int], rows: list[list[float]]) -> set[int]:
        votes, heads = self.latest.hear((layer, head), rows, live, self.window), text.seen[layer].shape[0]
        found = by_eigenvalues(text.queries[layer], heads, self.eigenvalues)
        wide = sum(other > found[head] for other in found) < (heads + 1) // 2
        late = {p for p in live if p > max(live) - self.window}
        early, reach = sorted(live - late), self.kernel // 2
        around = [[votes[p] for p in early[max(0, i - reach):i + reach + 1]] for i in range(len(early))]
        pooled = {p: max(near) if self.pooling == "max" else sum(near) / self.kernel for p, near in zip(early, around)}
        return late | best(pooled, (self.high if wide else self.low) - self.window)


def by_eigenvalues(queries: Tensor, heads: int, count: int) -> list[float]:
    """Entropy of each KV head's queries [heads, n, d], a row and an eigenvalue at a time, through singular values."""
    found = []
    for rows in queries.unflatten(0, (heads, -1)).flatten(1, 2):
        centred = [row - rows.mean(0) for row in rows]
        even = torch.stack([row / math.sqrt(float(row @ row)) for row in centred])
        squares = (torch.linalg.svdvals(even) ** 2).tolist()
        shares = sorted((s / sum(squares) for s in squares), reverse=True)[:count]
        found.append(-sum(s * math.log(s) for s in shares if s > 0) / math.log(rows.shape[1]))
    return found
