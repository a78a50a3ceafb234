"""NTK-Attention: a learnt summary replaces a long prefix, or what was evicted."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import elu, kl_div

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache.cache_training import Descent, descend
from playground.contract import AddsMemory, ReadsParts, knob
from playground.errors import Refusal
from playground.events import Figure, Note

SPREAD = 1e-4  # of the summaries before training
DESCENT = Descent("divergence from the model with the prefix", steps=120, rate=5e-3, every=20)
PREFIX = 2  # texts that are the prefix
HELD_OUT, TOGETHER = 8, 2  # texts that are not trained on; texts of a training step


class NTKPrefix(ReadsParts, AddsMemory):
    """Attend to a summary of a prefix beside the cache: a matrix and a vector per head, whatever the prefix's length.

    Attention over tokens is a softmax as before. A query q also reads the summary by linear attention: with features
    f(q) = elu(q / d^(1/4)) + 1 the matrix adds f(q) Z to the weighted values, and the vector f(q) |k| to the weights.
    `python -m playground fit ntk_prefix` learns both for every layer and query head, so that the model without the
    prefix imitates the model with the first of the texts before its prompt; nothing else is trained. The authors train
    on a task instead. This replaces a prefix and compresses no prompt. Without a fit there is no prefix. Our extension,
    which the paper does not have: `size` keeps the first and the latest tokens, and sums the evicted ones into a
    summary of each KV head, times `scale` over the head's width, since the features of a query and a key multiply to
    about that much where the softmax has 1. With scale 0 this is plain eviction, and with size 0 nothing is evicted.
    Held-out answers are 0.64 nats per token from the bundled model with its prefix of 307 tokens, and 2.20 without
    the summary. Liang et al. 2024, arXiv 2406.14036.
    """

    name, title, paper, sheet = "ntk_prefix", "Prefix summary (NTK-Attention)", "2406.14036", "kv-cache/ntk-prefix"
    guarantee = ("collapses",)
    sure = "medium"
    fitted_to_target, prefers_trained = True, True

    prefix: bool = knob(True, help="attend to the prefix that was fitted")
    size: int = knob(0, 0, 2048, step=1, help="tokens held; others are summed into the summary; 0 holds all")
    sinks: int = knob(4, 0, 64, step=1, help="first tokens, always held if there is a size")
    scale: float = knob(1.0, 0.0, 1.0, step=0.05, help="weight of evicted tokens in the summary; 0: they are forgotten")

    def __post_init__(self):
        self._trained: dict[str, Tensor] = {}
        self._evicted: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: sums [kv_heads, d, d] and [kv_heads, d]
        self._shares: dict[int, float] = {}
        self._written = 0

    def check(self):
        if self.size and self.sinks >= self.size:
            raise Refusal(f"sinks is {self.sinks} and only {self.size} tokens are held: raise size.", "size")

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"size": tokens, "sinks": min(cls.sinks, tokens - 1), "prefix": False}

    def expected_share(self, full):
        summary = (full.head + 1) / 2 if self.size and self.scale else 0  # of a head, in slots
        return min(1.0, ((self.size or full.length) + summary) / full.length)

    def begin_fitted(self, weights):
        self._trained = {name: tensor.float() for name, tensor in weights.items()}

    def begin(self, parts):
        self._trained = self._trained if self.prefix else {}

    @property
    def memory_bytes(self):
        return sum(tensor.nbytes for summary in self._evicted.values() for tensor in summary)

    def retain(self, held):
        self._written = held.next - held.prompt
        if not self.size or held.positions.shape[1] <= self.size:
            return held.live
        stays = (held.positions < self.sinks) | (held.positions >= held.next - (self.size - self.sinks))
        if self.scale:
            goes = (held.live & ~stays).expand(len(held.read("keys")), -1)
            self._summarise(held.layer, held.read("keys"), held.read("values"), goes)
        return held.live & stays

    def _summarise(self, layer: int, keys: Tensor, values: Tensor, goes: Tensor) -> None:
        """Add evicted slots, bool [kv_heads, slots], to the summary of a layer."""
        found = features(keys.to(torch.promote_types(keys.dtype, torch.float32))) * goes[..., None]
        found = found * (self.scale / keys.shape[2])
        new = found.transpose(1, 2) @ values.to(found), found.sum(1)
        old = self._evicted.get(layer)
        self._evicted[layer] = new if old is None else (old[0] + new[0], old[1] + new[1])

    def attend_memory(self, layer, query_states, query_positions, seen):
        matrix, vector = self._summary(layer, query_states)
        if matrix is None:
            return seen.out
        read = features(query_states.to(matrix))
        weight = (read @ vector[..., None])[..., 0]
        out, share = with_summary(seen, read @ matrix, weight)
        self._shares[layer] = float(share[:, -1].mean())
        return out

    def _summary(self, layer: int, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Matrix [heads, d, d] and weights [heads, d] of the prefix and of evicted tokens; None if there are none."""
        parts = []
        if self._trained:
            parts.append((self._trained["matrix"][layer], self._trained["vector"][layer].abs()))
        if layer in self._evicted:
            groups = len(query) // len(self._evicted[layer][0])
            parts.append(tuple(tensor.repeat_interleave(groups, 0) for tensor in self._evicted[layer]))
        if not parts:
            return None, None
        wide = torch.promote_types(query.dtype, torch.float32)
        return tuple(sum(each.to(query.device, wide) for each in column) for column in zip(*parts))

    def explain(self, prompt, layers):
        if self._shares:
            series = {f"layer {layer}": share for layer, share in sorted(self._shares.items())}
            yield Figure("scalar", "attention to the summary", {"x": self._written, "series": series})
        self._shares = {}

    @classmethod
    def calibrate(cls, texts, seed: int):
        """Learn summaries with which the model imitates itself with the first texts before the prompt."""
        network = DifferentiableLlama(texts.parts)
        prefix = [token for ids in texts.texts[:PREFIX] for token in ids]
        rest = texts.texts[PREFIX:]
        if len(rest) <= HELD_OUT:
            raise Refusal(f"{len(texts.texts)} texts are too few: the first {PREFIX} are the prefix, and more than "
                          f"{HELD_OUT} have to be left for the training.", "texts")
        teacher, held_out, rest = PrefixedTeacher(network, prefix), rest[:HELD_OUT], rest[HELD_OUT:]
        first, chance = network.layers[0], torch.Generator().manual_seed(seed)
        sizes = network.depth, first.heads, first.head_dim
        weights = {
            "matrix": torch.randn(*sizes, first.head_dim, generator=chance) * SPREAD,
            "vector": torch.randn(*sizes, generator=chance) * SPREAD,
        }

        def loss(step: int) -> Tensor:
            chosen = torch.Generator().manual_seed(seed * DESCENT.steps + step)
            numbers = torch.randint(len(rest), (TOGETHER,), generator=chosen).tolist()
            return sum(divergence(teacher, network, rest[number], weights) for number in numbers) / TOGETHER

        yield from descend(weights, loss, DESCENT, texts)
        with torch.no_grad():
            without, found = (
                sum(float(divergence(teacher, network, ids, each)) for ids in held_out) / HELD_OUT
                for each in (None, weights)
            )
        yield Note(f"Divergence from the model with the prefix on held-out texts: {without:.3f} nats per token without "
                   f"it, {found:.3f} with the summary of its {len(prefix)} tokens.")
        return {name: tensor.half() for name, tensor in weights.items()}


def features(x: Tensor) -> Tensor:
    """Positive features of query or key states [..., d]."""
    return elu(x / x.shape[-1] ** 0.25) + 1


def with_summary(seen, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [heads, n, d] over slots and a summary, and the share of the summary, [heads, n].

    `seen` is attention over the slots, with the log-sum-exp of its scores; `values` [heads, n, d] and `weights`
    [heads, n] are what the summary adds to the numerator and the denominator.
    """
    total = seen.total.to(weights.dtype)
    most = total.clamp(min=0)
    own, other = (total - most).exp(), (-most).exp()
    denominator = own + other * weights
    out = (own[..., None] * seen.out.to(values) + other[..., None] * values) / denominator[..., None]
    return out, other * weights / denominator


class PrefixedTeacher:
    """The model with a prefix in its cache."""

    @torch.no_grad()
    def __init__(self, network: DifferentiableLlama, prefix: list[int]):
        self._network, self._length, self._held = network, len(prefix), {}

        def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self._held[layer] = keys, values
            return network.attend(query, keys, values)

        network(network.embed(torch.tensor(prefix)), torch.arange(len(prefix)), attend)

    @torch.no_grad()
    def log_probabilities(self, ids: list[int]) -> Tensor:
        """After each token of a text that follows the prefix, [n, V]."""
        network, positions = self._network, torch.arange(self._length, self._length + len(ids))

        def attend(layer: int, query: Tensor, *new: Tensor) -> Tensor:
            return network.attend(query, *(torch.cat(parts, 1) for parts in zip(self._held[layer], new)))

        return network.logits(network(network.embed(torch.tensor(ids)), positions, attend)).log_softmax(-1)


def divergence(teacher: PrefixedTeacher, network: DifferentiableLlama, ids: list[int], weights: dict | None) -> Tensor:
    """Mean divergence of the model with summaries, or with none, from the model after a prefix, in nats per token."""
    attend = network.attend_causally if weights is None else summarised(network, weights)
    hidden = network(network.embed(torch.tensor(ids)), torch.arange(len(ids)), attend)
    logs = network.logits(hidden).log_softmax(-1)
    return kl_div(logs, teacher.log_probabilities(ids), reduction="batchmean", log_target=True)


def summarised(network: DifferentiableLlama, weights: dict[str, Tensor]):
    """Attention over the tokens and the summaries."""

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        groups, rows = len(query) // len(keys), query.shape[1]
        scores = query @ keys.repeat_interleave(groups, 0).transpose(1, 2) * network.scaling
        scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
        most = scores.detach().amax(-1, keepdim=True).clamp(min=0)
        shares, other, read = (scores - most).exp(), (-most).exp(), features(query)
        summed = shares @ values.repeat_interleave(groups, 0) + other * (read @ weights["matrix"][layer])
        weight = read @ weights["vector"][layer].abs()[..., None]
        return summed / (shares.sum(-1, keepdim=True) + other * weight)

    return attend
