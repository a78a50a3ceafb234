"""Compressed KV heads: a model whose query heads share fewer key and value heads."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from playground.contract import Variant, knob
from playground.errors import Refusal
from playground.events import Figure, Note

FAMILIES = ("llama", "mistral", "qwen2")  # rotary embedding of all channels, nothing between projection and rotation
READ = 256  # tokens of a forward of the calibration
EVERY = 20  # steps between two measurements


class KVHeadCompression(Variant):
    """Replace groups of KV heads by one head each, so that the cache of the new model is that much smaller.

    Keys and values of calibration texts show which linear combination of the heads of a group loses least; the maps
    back to each head are absorbed by the query and output projections, so the result is an ordinary model with fewer KV
    heads. Values are combined by the singular vectors of all channels of a group. Keys have to be combined before the
    rotary embedding, which a map commutes with if it treats the two channels of a frequency as one complex number:
    each frequency has a complex singular vector over the heads. It is the same for keys before and after the rotation.
    Which of the ways around the rotary embedding the authors ship is not known. The mean of the heads, and the
    singular vectors of the weights, are baselines. Afterwards low-rank additions to all attention projections are
    trained to restore the distributions of the original model on the texts, and merged; the authors fine-tune with
    LoRA, at settings that are not known. With groups of one head and no steps nothing changes. Models with few KV heads
    have little to share, and lose quality at once without training. Yu et al. 2024, arXiv 2406.07056.
    """

    name, title, paper, sheet = (
        "kv_head_compress", "Compressed KV heads", "2406.07056", "kv-cache/kv-head-compress"
    )
    adjective, guarantee, needs = "fewer KV heads", ("heuristic",), ("corpus",)
    reconstruction, sure = True, "medium"

    group: int = knob(2, 1, 8, step=1, help="KV heads that become one; it must divide their number")
    method: str = knob(
        "activations", choices=("activations", "weights", "mean"), help="singular vectors of what; mean: no choice"
    )
    calibration: int = knob(4096, 256, 65536, step=256, help="tokens of the texts that are read for the choice")
    steps: int = knob(200, 0, 5000, step=20, help="training steps afterwards; 0: no fine-tuning")
    rank: int = knob(16, 1, 128, step=1, help="rank of the additions that are trained")
    lr: float = knob(1e-3, 1e-6, 1e-1, help="learning rate")
    length: int = knob(128, 16, 512, step=16, help="tokens of a training window")
    batch: int = knob(4, 1, 32, step=1, help="windows of a training step")

    def make(self, network, texts, seed) -> Iterator[Figure | Note]:
        config = network.config
        self._check(config, network)
        teacher_rows = self._teacher(network, texts, seed) if self.steps else None
        for number, attention in enumerate(layer.self_attn for layer in network.model.layers):
            found = HeadCombination.of(self._statistics(network, attention, texts), config, self.group)
            found.absorb(attention)
            if found.energy:
                data = {"x": number, "axis": "layer", "series": found.energy}
                yield Figure("scalar", "energy that stays, by layer", data)
        config.num_key_value_heads //= self.group
        if self.steps:
            yield from self._tune(network, *teacher_rows, seed)
        else:
            yield Note("No fine-tuning: the new model is the best combination of heads, and nothing was trained.")

    def _check(self, config, network) -> None:
        attention = network.model.layers[0].self_attn if hasattr(network, "model") else None
        if config.model_type not in FAMILIES or getattr(config, "partial_rotary_factor", 1.0) != 1.0:
            raise Refusal(f"Heads of {config.model_type} models cannot be combined, only those of "
                          f"{', '.join(FAMILIES)}: choose another model.", "model")
        if config.num_key_value_heads % self.group or hasattr(attention, "q_norm"):
            raise Refusal(f"This model has {config.num_key_value_heads} KV heads, which {self.group} does not divide: "
                          "choose another group.", "group")

    def _statistics(self, network, attention, texts) -> dict[str, Tensor]:
        """Sums of products of the channels of all KV heads, [D, D], of keys and of values."""
        if self.method == "weights":
            parts = {"keys": attention.k_proj.weight, "values": attention.v_proj.weight}
            return {part: weight.detach() @ weight.detach().T for part, weight in parts.items()}
        if self.method == "mean":
            return {}
        found, handles = {}, []
        for part, projection in (("keys", attention.k_proj), ("values", attention.v_proj)):
            def add(module, given, out, part=part):
                rows = out.flatten(0, -2)
                found[part] = found.get(part, 0) + rows.T @ rows
            handles.append(projection.register_forward_hook(add))
        with torch.inference_mode():
            for ids in windows(texts, READ, self.calibration):
                network.model(input_ids=ids[None].to(network.device), use_cache=False)
        for handle in handles:
            handle.remove()
        return {part: total.clone() for part, total in found.items()}

    def _teacher(self, network, texts, seed) -> tuple[Tensor, Tensor]:
        """Random windows [steps * batch, length] and the original distributions after their tokens, in half precision.
        """
        whole = [ids for ids in windows(texts, self.length) if len(ids) == self.length]
        if len(whole) < self.batch:
            raise Refusal(f"The texts have {len(whole)} windows of {self.length} tokens, and a step needs {self.batch}:"
                          " add text, or lower length or batch.", "texts")
        stacked = torch.stack(whole)
        with torch.inference_mode():
            logs = [network(input_ids=ids[None].to(network.device), use_cache=False).logits[0].log_softmax(-1).half()
                    for ids in stacked]
        return stacked, torch.stack(logs).clone()

    def _tune(self, network, ids: Tensor, logs: Tensor, seed: int) -> Iterator[Figure | Note]:
        """Train low-rank additions on the divergence from the original distributions, and merge them."""
        chance, network = torch.Generator().manual_seed(seed), network.eval()
        network.requires_grad_(False)
        attentions = [layer.self_attn for layer in network.model.layers]
        added = [addition for attention in attentions for addition in additions(attention, self.rank, chance)]
        optimiser = torch.optim.Adam([weight for each in added for weight in (each.down, each.up)], self.lr)
        recent = []
        for step in range(1, self.steps + 1):
            rows = torch.randint(len(ids), (self.batch,), generator=chance)
            out = network(input_ids=ids[rows].to(network.device), use_cache=False).logits.log_softmax(-1)
            loss = kl_div(out.flatten(0, 1), logs[rows].to(out).flatten(0, 1), reduction="batchmean", log_target=True)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            recent.append(loss.item())
            if step % EVERY == 0 or step == self.steps:
                mean = sum(recent) / len(recent)
                yield Figure("scalar", self.name, {"x": step, "series": {"divergence": mean}})
                recent = []
        for each in added:
            each.merge()
        yield Note(f"Fine-tuned: the divergence from the original model is {mean:.3f} nats per token on the texts.")


def windows(texts: list[list[int]], length: int, most: int | None = None) -> Iterator[Tensor]:
    """The texts in pieces of `length` tokens, the last of each text shorter; `most` tokens in all."""
    read = 0
    for ids in texts:
        for start in range(0, len(ids), length):
            if most is not None and read >= most:
                return
            piece = ids[start:start + length]
            read += len(piece)
            yield torch.tensor(piece)


class HeadCombination:
    """How the heads of each group of one layer become one: maps [groups, t, d, d] of keys and of values.

    The new head is the sum of the maps times the heads; each head is rebuilt by the transpose of its map.
    """

    def __init__(self, maps: dict[str, Tensor], energy: dict[str, float]):
        self.maps, self.energy = maps, energy

    @classmethod
    def of(cls, statistics: dict[str, Tensor], config, group: int) -> HeadCombination:
        """From sums of products of all channels; without any, the mean of the heads."""
        d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        groups = config.num_key_value_heads // group
        if not statistics:
            mean = torch.eye(d, dtype=torch.double).expand(groups, group, d, d) / group ** 0.5
            return cls({"keys": mean, "values": mean}, {})
        maps, energy = {}, {}
        for part, combine in (("keys", key_maps), ("values", value_maps)):
            own = statistics[part].unflatten(0, (groups, -1)).unflatten(2, (groups, -1)).diagonal(dim1=0, dim2=2)
            found = [combine(square, group) for square in own.movedim(-1, 0)]
            maps[part] = torch.stack([each[0] for each in found])
            energy[part] = sum(each[1] for each in found) / float(own.movedim(-1, 0).diagonal(dim1=1, dim2=2).sum())
        return cls(maps, energy)

    def absorb(self, attention: nn.Module) -> None:
        """Put the maps into the projections of a layer."""
        keys, values = (self.maps[part].to(attention.k_proj.weight) for part in ("keys", "values"))
        groups, t, d, _ = keys.shape
        with torch.no_grad():
            attention.k_proj = combined(attention.k_proj, keys)
            attention.v_proj = combined(attention.v_proj, values)
            share = attention.q_proj.out_features // d // (groups * t)  # query heads of an old KV head
            for_queries, for_outputs = (each.flatten(0, 1).repeat_interleave(share, 0) for each in (keys, values))
            query, output = attention.q_proj, attention.o_proj
            by_head = query.weight.unflatten(0, (-1, d))
            query.weight.copy_(torch.einsum("hij,hjm->him", for_queries, by_head).flatten(0, 1))
            if query.bias is not None:
                query.bias.copy_(torch.einsum("hij,hj->hi", for_queries, query.bias.unflatten(0, (-1, d))).flatten())
            back = torch.einsum("mhj,hij->mhi", output.weight.unflatten(1, (-1, d)), for_outputs)
            output.weight.copy_(back.flatten(1))
        attention.num_key_value_groups *= t


def combined(projection: nn.Linear, maps: Tensor) -> nn.Linear:
    """The projection [groups * t * d, m] of old heads as one of new heads, with maps [groups, t, d, d]."""
    groups, t, d, _ = maps.shape
    new = nn.Linear(projection.in_features, groups * d, projection.bias is not None).to(projection.weight)
    new.weight.copy_(torch.einsum("gtij,gtjm->gim", maps, projection.weight.view(groups, t, d, -1)).flatten(0, 1))
    if projection.bias is not None:
        new.bias.copy_(torch.einsum("gtij,gtj->gi", maps, projection.bias.view(groups, t, d)).flatten())
    return new


def value_maps(square: Tensor, t: int) -> tuple[Tensor, float]:
    """Maps [t, d, d] of the heads of a group with sums of products [t * d, t * d], and the energy that stays."""
    energies, vectors = torch.linalg.eigh(square.double())
    d = len(square) // t
    return vectors[:, -d:].flip(1).T.unflatten(1, (t, d)).transpose(0, 1).to(square), float(energies[-d:].sum())


def key_maps(square: Tensor, t: int) -> tuple[Tensor, float]:
    """As `value_maps`, with maps that commute with the rotary embedding: a complex number for a head and frequency.

    The channels f and f + d / 2 of a head are the real and imaginary part of frequency f.
    """
    d = len(square) // t
    parts = square.double().view(t, 2, d // 2, t, 2, d // 2).diagonal(dim1=2, dim2=5)  # [t, 2, t, 2, d / 2]
    real, imaginary = parts[:, 0, :, 0] + parts[:, 1, :, 1], parts[:, 0, :, 1] - parts[:, 1, :, 0]
    hermitian = torch.complex(real, imaginary).movedim(-1, 0)  # sums of conj(k_i) k_j, [d / 2, t, t]
    energies, vectors = torch.linalg.eigh(hermitian)
    weights = vectors[:, :, -1].T  # of each head in the new one, [t, d / 2]
    maps = square.new_zeros(t, d, d)
    low, high = torch.arange(d // 2), torch.arange(d // 2, d)
    maps[:, low, low] = maps[:, high, high] = weights.real.to(square)
    maps[:, low, high], maps[:, high, low] = -weights.imag.to(square), weights.imag.to(square)
    return maps, float(energies[:, -1].sum())


class LowRankAddition:
    """A low-rank addition to a linear layer while it is trained."""

    def __init__(self, projection: nn.Linear, rank: int, chance: torch.Generator):
        out, size = projection.weight.shape
        self._projection = projection
        self.down = (torch.randn(rank, size, generator=chance) * size ** -0.5).to(projection.weight).requires_grad_()
        self.up = torch.zeros(out, rank).to(projection.weight).requires_grad_()
        self._handle = projection.register_forward_hook(
            lambda module, given, result: result + given[0] @ self.down.T @ self.up.T
        )

    def merge(self) -> None:
        """Add it to the weights."""
        self._handle.remove()
        with torch.no_grad():
            self._projection.weight += self.up @ self.down


def additions(attention: nn.Module, rank: int, chance: torch.Generator) -> list[LowRankAddition]:
    """An addition for each projection of a layer's attention."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return [LowRankAddition(getattr(attention, name), rank, chance) for name in names]
