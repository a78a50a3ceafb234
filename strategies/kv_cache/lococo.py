"""LoCoCo: a fixed number of slots, some of which mix all tokens that are not heavy hitters."""
from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import conv1d, cross_entropy

from playground.algorithms.differentiable_llama import DifferentiableLlama
from playground.algorithms.kv_cache.attention_scores import AttentionScores, top_slots
from playground.algorithms.kv_cache.cache_training import Descent, descend
from playground.contract import DecidesByHead, ReadsAttention, ReadsInChunks, knob
from playground.errors import Refusal
from playground.events import Figure, Note

KERNEL, CHANNELS = 21, 32  # width of the convolution, and mixed slots that it is trained for
DESCENT = Descent("loss after compressed chunks", steps=100, rate=2e-3, every=10)
BLEND = 0.5  # of the untrained convolution
TRAINED_SIZES = (16, 24, 32, 48)
TRAINED_CHUNK, SHORTEST = 32, 96  # tokens of a chunk; of the texts that are trained on
TOGETHER, HELD_OUT = 2, 8  # texts of a training step; texts that are not trained on


class LoCoCo(ReadsInChunks, ReadsAttention, DecidesByHead):
    """Hold a fixed number of slots: the tokens that receive most attention as they are, and mixtures of all others.

    Whenever the slots and the buffer are full, the `heavy` share of the slots goes to the tokens that the last forward
    attended to most. The keys and values of all others are mixed into the remaining slots: a convolution over their
    sequence gives every mixed slot a softmax over them, which is blended with a plain choice of the best of them. The
    prompt is read in chunks, and compressed after each. `python -m playground fit lococo` trains the convolution and
    the blend of each layer to predict the chunk after a compression. Without a fit the blend is 0, which is eviction by
    the attention of the last forward. One fit serves all sizes: for another number of mixed slots than it was trained
    for, channels are taken at even distances. Slots stay in the order of the text, a mixture at the place of the token
    that its slot would have kept; the released code moves mixtures to the end. Its softmax over a ReLU is kept, its
    stretched positions and fine-tuning are not. Cai et al. 2024, arXiv 2406.05317.
    """

    name, title, paper, sheet = "lococo", "Learnt mixtures (LoCoCo)", "2406.05317", "kv-cache/lococo"
    guarantee = ("budget_respected", "collapses")
    reconstruction = True
    fitted_to_target, prefers_trained = True, True
    questions_per_task = 40

    size: int = knob(64, 2, 2048, step=1, help="slots after a compression")
    heavy: float = knob(0.5, 0.0, 1.0, step=0.05, help="share of the slots for tokens with the most attention")
    recent: int = knob(0, 0, 1024, step=1, help="newest tokens that are always among the heavy ones")
    buffer: int = knob(16, 0, 64, step=1, help="tokens beyond the slots before the next compression")
    chunk: int = knob(64, 1, 512, step=1, help="tokens of the prompt between two compressions")
    mixing: bool = knob(True, help="mix with what was fitted; off: evict instead")

    def __post_init__(self):
        self.attention, self._weights = AttentionScores(), {}
        self._noted, self._members = False, {}

    def check(self):
        if self.recent > self.heavy_slots:
            raise Refusal(f"recent is {self.recent} and only {self.heavy_slots} slots are for heavy tokens: lower "
                          "recent, or raise size or heavy.", "recent")

    @property
    def heavy_slots(self) -> int:
        return self.size - math.floor(self.size * (1 - self.heavy) + 1e-9)

    @property
    def prefill_chunk(self):
        return self.chunk

    @classmethod
    def knobs_for_budget(cls, tokens, prompt):
        return {"size": tokens, "buffer": 0}

    def for_heads(self, layer, heads):
        alone = super().for_heads(layer, heads)
        alone.attention, alone._members = self.attention.for_heads(layer, heads), {}
        return alone

    def rests(self, slots, length, prompt):
        return slots <= self.size + self.buffer

    def budget(self, generated):
        return self.size + self.buffer

    def begin_fitted(self, weights):
        self._weights = {name: tensor.float() for name, tensor in weights.items()}

    def observe_attention(self, layer, weights, query_positions, key_positions):
        self.attention.replace(layer, weights, key_positions, self.text_length)

    def retain(self, held):
        if held.positions.shape[1] <= self.size + self.buffer:
            return held.live
        scores = self.attention.of(held.layer, held.positions, held.next)
        scores = scores.expand(len(held.read("keys")), -1)
        heavy = self._heavy(scores, held)
        picks = top_slots(scores, self.size - self.heavy_slots, held.live & ~heavy)
        if self.mixing and self._weights and bool(picks.any()):
            self._mix(held, heavy, picks)
        return heavy | picks

    def _heavy(self, scores: Tensor, held) -> Tensor:
        """The slots that stay as they are, [kv_heads, slots]."""
        recent = (held.positions >= held.next - self.recent).expand_as(scores)
        return recent | top_slots(scores, self.heavy_slots - self.recent, held.live & ~recent)

    def _mix(self, held, heavy: Tensor, picks: Tensor) -> None:
        """Overwrite the picked slots with mixtures of all that are not heavy."""
        others, picked = (mask.nonzero()[:, 1].view(len(mask), -1) for mask in (~heavy, picks))
        keys, values = held.read("keys"), held.read("values")
        kernel, bias = (self._weights[name][held.layer] for name in ("kernel", "bias"))
        states = torch.cat([taken(keys, others), taken(values, others)], 2)
        place = torch.searchsorted(others, picked)  # of each pick among the others
        weights = mixing_weights(states, place, kernel, bias, float(self._weights["blend"][held.layer]))
        self._members[held.layer] = effective_members(weights)
        for part, rows in (("keys", keys), ("values", values)):
            mixed = weights.to(rows) @ taken(rows, others)
            held.write(part, rows.scatter(1, picked[..., None].expand_as(mixed), mixed))

    def explain(self, prompt, layers):
        if self.mixing and not self._weights and not self._noted:
            self._noted = True
            yield Note("LoCoCo without a fit: tokens are evicted by their attention, and none are mixed. `python -m "
                       "playground fit lococo` trains the mixtures for this model.")
        if self._members:
            data = {"labels": [f"layer {layer}" for layer in self._members], "values": list(self._members.values())}
            yield Figure("bars", "tokens in a mixture, on average", data)
        self._members = {}

    @classmethod
    def calibrate(cls, texts, seed: int):
        """Train on chunks of the longest texts: each compression serves the prediction of the chunk after it."""
        network = DifferentiableLlama(texts.parts)
        long = [ids for ids in texts.texts if len(ids) >= SHORTEST] or texts.texts
        held_out, long = long[:HELD_OUT], long[HELD_OUT:] or long
        channels = 2 * network.layers[0].head_dim
        chance = torch.Generator().manual_seed(seed)
        kernel = torch.randn(network.depth, CHANNELS, channels, KERNEL, generator=chance) * (channels * KERNEL) ** -0.5
        weights = {
            "kernel": kernel,
            "bias": torch.zeros(network.depth, CHANNELS),
            "blend": torch.full((network.depth,), BLEND),
        }

        def loss(step: int) -> Tensor:
            chosen = torch.Generator().manual_seed(seed * DESCENT.steps + step)
            numbers = torch.randint(len(long), (TOGETHER,), generator=chosen).tolist()
            size = TRAINED_SIZES[int(torch.randint(len(TRAINED_SIZES), (1,), generator=chosen))]
            return sum(stream_loss(network, long[number], weights, size) for number in numbers) / TOGETHER

        yield from descend(weights, loss, DESCENT, texts)
        evicting = {**weights, "blend": torch.zeros_like(weights["blend"])}
        with torch.no_grad():
            mixed, evicted = (
                sum(float(stream_loss(network, ids, each, TRAINED_SIZES[0])) for ids in held_out) / len(held_out)
                for each in (weights, evicting)
            )
        yield Note(f"Loss after compressions on held-out texts: {mixed:.3f} nats with mixtures, {evicted:.3f} with "
                   "eviction instead.")
        return {name: tensor.half() for name, tensor in weights.items()}


def taken(rows: Tensor, slots: Tensor) -> Tensor:
    """Rows [kv_heads, n, d] at slots [kv_heads, m]."""
    return rows.gather(1, slots[..., None].expand(-1, -1, rows.shape[2]))


def mixing_weights(states: Tensor, place: Tensor, kernel: Tensor, bias: Tensor, blend: float | Tensor) -> Tensor:
    """Share of each of m tokens in each of c mixtures, [kv_heads, c, m]; every row sums to 1.

    `states` [kv_heads, m, 2 d] are keys and values in the order of the text, `place` [kv_heads, c] which token each
    mixture would be without mixing.
    """
    channels = torch.linspace(0, len(kernel) - 1, place.shape[1]).round().long().to(kernel.device)
    logits = conv1d(states.transpose(1, 2).to(kernel), kernel[channels], bias[channels], padding=kernel.shape[2] // 2)
    learnt = logits.relu().softmax(-1)
    plain = torch.zeros_like(learnt).scatter(2, place[..., None], 1.0)
    return blend * learnt + (1 - blend) * plain


def effective_members(weights: Tensor) -> float:
    """Mean over the mixtures of e to the entropy of their shares, [kv_heads, c, m]."""
    return float(torch.special.entr(weights).sum(-1).exp().mean())


def stream_loss(network: DifferentiableLlama, ids: list[int], weights: dict[str, Tensor], size: int) -> Tensor:
    """Mean next-token loss of the chunks of a text that follow a compression to `size` slots.

    The contents of the slots are constants: a chunk's loss trains the compression before it only.
    """
    memory: list[tuple[Tensor, Tensor]] = [None] * network.depth
    sums: list[Tensor] = [None] * network.depth
    losses = []
    for start in range(0, len(ids) - 1, TRAINED_CHUNK):
        chunk = torch.tensor(ids[start:start + TRAINED_CHUNK])
        follows = torch.tensor(ids[start + 1:start + 1 + TRAINED_CHUNK])
        squeezed = start > 0 and memory[0][0].shape[1] > size
        if squeezed:
            memory = [compressed(*memory[layer], sums[layer], weights, layer, size) for layer in range(network.depth)]
        hidden = read_chunk(network, chunk, start, memory, sums)
        if squeezed and len(follows):
            losses.append(cross_entropy(network.logits(hidden)[:len(follows)], follows))
        memory = [(keys.detach(), values.detach()) for keys, values in memory]
    return torch.stack(losses).mean() if losses else sum(tensor.sum() for tensor in weights.values()) * 0.0


def read_chunk(network: DifferentiableLlama, chunk: Tensor, start: int, memory: list, sums: list) -> Tensor:
    """The input of the lm_head of a chunk; appends its states to `memory`, and writes the attention to `sums`."""

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if memory[layer] is not None:
            keys, values = (torch.cat(pair, 1) for pair in zip(memory[layer], (keys, values)))
        memory[layer] = keys, values
        with torch.no_grad():
            sums[layer] = column_sums(query, keys, network.scaling)
        return network.attend(query, keys, values)

    positions = torch.arange(start, start + len(chunk))
    return network(network.embed(chunk), positions, attend)


def column_sums(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Attention that each key receives from the rows, [kv_heads, m]."""
    rows, slots = query.shape[1], keys.shape[1]
    grouped = query.reshape(len(keys), -1, query.shape[2])
    scores = (grouped @ keys.transpose(1, 2)).view(len(keys), -1, rows, slots) * scaling
    later = torch.ones(rows, slots, dtype=torch.bool).triu(slots - rows + 1)
    return scores.masked_fill(later, -math.inf).softmax(-1).sum((1, 2))


def compressed(
    keys: Tensor, values: Tensor, scores: Tensor, weights: dict[str, Tensor], layer: int, size: int
) -> tuple[Tensor, Tensor]:
    """Keys and values in `size` slots, half of them heavy, in the order of the text."""
    every = torch.ones_like(scores, dtype=torch.bool)
    heavy = top_slots(scores, size - size // 2, every)
    picks = top_slots(scores, size // 2, ~heavy)
    others, picked = (mask.nonzero()[:, 1].view(len(mask), -1) for mask in (~heavy, picks))
    states = torch.cat([taken(keys, others), taken(values, others)], 2)
    place = torch.searchsorted(others, picked)
    shares = mixing_weights(states, place, weights["kernel"][layer], weights["bias"][layer], weights["blend"][layer])
    stays = (heavy | picks).nonzero()[:, 1].view(len(keys), -1)
    return tuple(
        taken(rows.scatter(1, picked[..., None].expand(-1, -1, rows.shape[2]), shares @ taken(rows, others)), stays)
        for rows in (keys, values)
    )
