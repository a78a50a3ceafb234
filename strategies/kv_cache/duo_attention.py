"""DuoAttention: retrieval heads hold the whole text, streaming heads its ends."""
from __future__ import annotations

import torch
from torch import Tensor

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache.cache_training import Descent, descend
from playground.contract import DecidesByHead, knob
from playground.events import Figure, Note

DESCENT = Descent("distance and penalty", steps=160, rate=4e-2, every=20)
PENALTY = 0.05  # of the gates
SINKS, RECENT = 4, 16  # that streaming heads see in the training
SHORTEST, JUDGED, TOGETHER = 64, 24, 2  # tokens of texts; last tokens of a text that count; texts of a step


class DuoAttention(DecidesByHead):
    """Hold the whole text in the heads that retrieve from it, and only its first and latest tokens in all others.

    `python -m playground fit duo_attention` learns a gate for every KV head, between full attention and attention to
    the first and latest tokens: the last hidden states of the model with gates should equal those of the model itself,
    while the gates are pulled to zero. The `share` of all heads with the largest gates are retrieval heads. Useful
    where few heads look far back, which is the case for most models. The authors learn from synthetic passkeys in long
    texts; here the end of each text counts. Without a fit every head is a retrieval head. A streaming head takes the
    memory of the few tokens it holds; while a layer is read, its heads are spread out to equal lengths, so no reading
    is saved. share = 1 is the full cache, 0 a window with sinks. Xiao et al. 2024, arXiv 2410.10819.
    """

    name, title, paper, sheet = (
        "duo_attention", "Retrieval and streaming heads (DuoAttention)", "2410.10819", "kv-cache/duo-attention"
    )
    guarantee = ("collapses",)
    fitted_to_target, prefers_trained = True, True
    questions_per_task = 40

    share: float = knob(0.5, 0.0, 1.0, step=0.05, help="share of the KV heads that hold the whole text; 1: all")
    sinks: int = knob(4, 0, 64, step=1, help="first tokens that streaming heads hold")
    recent: int = knob(32, 1, 2048, step=1, help="most recent tokens that streaming heads hold")

    def __post_init__(self):
        self._gates: Tensor | None = None  # [layers, kv_heads]
        self._heads: Tensor | None = None  # of which the heads it is asked about are copies
        self._shown = False

    def begin_fitted(self, weights):
        self._gates = weights["gates"].float()

    def expected_share(self, full):
        if self._gates is None:
            return 1.0
        whole = self.retrieval_heads().float().mean()
        return float(whole + (1 - whole) * min(1.0, (self.sinks + self.recent) / full.length))

    def retrieval_heads(self) -> Tensor:
        """Which heads hold the whole text, bool [layers, kv_heads]."""
        count = round(self.share * self._gates.numel())
        best = self._gates.flatten().argsort(descending=True, stable=True)[:count]
        return torch.zeros(self._gates.numel(), dtype=torch.bool).scatter(0, best, True).view_as(self._gates)

    def retain(self, held):
        if self._gates is None:
            return held.live
        near = (held.positions < self.sinks) | (held.positions >= held.next - self.recent)
        whole = self.retrieval_heads()[held.layer].to(near.device)
        whole = whole if self._heads is None else whole[self._heads]
        return held.live & (near | whole[:, None])

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone._heads = heads if self._heads is None else self._heads[heads]
        return alone

    def rests(self, slots, length, prompt):
        return self._gates is None

    def explain(self, prompt, layers):
        if self._shown:
            return
        self._shown = True
        if self._gates is None:
            yield Note("DuoAttention without a fit: every head holds the whole text. `python -m playground fit "
                       "duo_attention` learns which heads of this model need it.")
        else:
            data = {
                "rows": [f"layer {layer}" for layer in range(len(self._gates))],
                "columns": [f"head {head}" for head in range(self._gates.shape[1])],
                "values": [[round(gate, 3) for gate in row] for row in self._gates.clamp(0, 1).tolist()],
            }
            yield Figure("matrix", "gates: 1 retrieves, 0 streams", data)

    @classmethod
    def calibrate(cls, texts, seed: int):
        """Learn the gates from texts that are long enough for streaming heads to miss something."""
        network = DifferentiableLlama(texts.parts)
        long = [ids for ids in texts.texts if len(ids) >= SHORTEST] or texts.texts
        weights = {"gates": torch.ones(network.depth, network.layers[0].kv_heads)}

        def loss(step: int) -> Tensor:
            chosen = torch.Generator().manual_seed(seed * DESCENT.steps + step)
            numbers = torch.randint(len(long), (TOGETHER,), generator=chosen).tolist()
            distance = sum(distance_of(network, long[number], weights["gates"]) for number in numbers) / TOGETHER
            return distance + PENALTY * weights["gates"].abs().sum()

        yield from descend(weights, loss, DESCENT, texts)
        return {"gates": weights["gates"].clamp(0, 1).half()}


def distance_of(network: DifferentiableLlama, ids: list[int], gates: Tensor) -> Tensor:
    """Mean squared distance of the last hidden states with gates from the model's own, at the end of a text."""
    text, positions = torch.tensor(ids), torch.arange(len(ids))
    with torch.no_grad():
        own = network(network.embed(text), positions, network.attend_causally)
    gated = network(network.embed(text), positions, gated_attention(network, gates, len(ids)))
    return (gated - own)[-JUDGED:].square().mean()


def gated_attention(network: DifferentiableLlama, gates: Tensor, length: int):
    """Attention that mixes full and streaming attention by the gate of each KV head, in [0, 1]."""
    rows, slots = torch.arange(length)[:, None], torch.arange(length)
    near = (rows >= slots) & ((slots < SINKS) | (rows - slots < RECENT))

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        gate = gates[layer].clamp(0, 1).repeat_interleave(len(query) // len(keys))[:, None, None]
        return gate * network.attend(query, keys, values) + (1 - gate) * network.attend(query, keys, values, near)

    return attend
