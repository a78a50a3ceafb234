"""S2D: a draft network of nested sub-networks, of which each draft token uses the shallowest that is confident."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, RMSNorm

from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.feature_networks import EPS, set_eps, shape_of, without_facts
from playground.algorithms.draft_heads.head_layers import (
    THETA,
    GatedFeedForward,
    HeadCache,
    HeadShape,
    NewRows,
    Place,
    SelfAttention,
    WholeTexts,
)
from playground.algorithms.draft_heads.head_training import (
    FirstLayers,
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    ahead,
    embedded,
    ranks,
    token_loss,
    trained,
)
from playground.algorithms.speculative.drafting import independent, new_tree
from playground.contract import Lane, knob
from playground.contract.token_tree import ROOT
from playground.errors import Refusal
from playground.events import Figure, Note

CHUNK = 512  # tokens of the text that the network reads at once
SHARE, EXITS = 3 / 8, 3  # of the target's layers that are copied, as 12 of 32 in the paper; sub-networks
Weights = dict[str, Tensor]


class NestedLayer(Module):
    """A decoder layer of Llama."""

    def __init__(self, shape: HeadShape, theta: float = THETA):
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(shape, theta=theta), GatedFeedForward(shape)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(shape.width, EPS), RMSNorm(shape.width, EPS)

    def forward(self, rows: Tensor, place: Place) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), place)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class NestedNetwork(Module):
    """Decoder layers with exits after some of them; all exits share one norm, and the target's lm_head."""

    def __init__(self, shape: HeadShape, exits: list[int], theta: float = THETA):
        super().__init__()
        self.layers = ModuleList(NestedLayer(shape, theta) for _ in range(exits[-1]))
        self.norm = RMSNorm(shape.width, EPS)
        self.register_buffer("exits", torch.tensor(exits))
        self.exit_layers = exits  # on the host, which reads them for every token

    @property
    def groups(self) -> list[range]:
        """The layers between an exit and the one before it."""
        return [range(first, end) for first, end in zip([0, *self.exit_layers], self.exit_layers)]

    def whole(self, rows: Tensor) -> Iterator[Tensor]:
        """For each exit the inputs of the lm_head, [texts, tokens, width], of embedded texts."""
        place = WholeTexts(rows.shape[1])
        for group in self.groups:
            for layer in group:
                rows = self.layers[layer](rows, place)
            yield self.norm(rows)

    @classmethod
    def copied(cls, target: FirstLayers, exits: list[int]) -> NestedNetwork:
        """A copy of the target's first layers. Raises Refusal if they have weights that a Llama layer has not."""
        names = {f"layers.{at}.{name}": part for at, layer in enumerate(target.layers) for name, part in layer.items()}
        shape = shape_of(names, "layers.0.", len(target.norm), target.head_dim)
        network = cls(shape, exits, target.theta)
        try:
            network.load_state_dict({**names, "norm.weight": target.norm, "exits": torch.tensor(exits)})
        except RuntimeError:
            raise Refusal(
                "The layers of this target have weights that those of a Llama model do not have, so they cannot be "
                "copied: choose another drafter, or another model.",
                "model",
            ) from None
        set_eps(network, target.eps)
        return network

    @classmethod
    def of(cls, weights: Weights) -> NestedNetwork:
        """The network with these weights. Raises KeyError or RuntimeError if they are of another network."""
        weights, facts = without_facts(weights)
        shape = shape_of(weights, "layers.0.", weights["norm.weight"].shape[0], facts.get("head_dim"))
        network = cls(shape, weights["exits"].tolist(), facts.get("rope_theta", THETA))
        network.load_state_dict(weights)
        set_eps(network, facts.get("rms_norm_eps", EPS))
        return network


class S2D(DraftHead):
    """A copy of the target's first layers drafts, trained so that its inner layers predict tokens as well: each draft
    token uses as few layers as it needs. As in the paper, sub-networks differ in depth alone.

    The layers form nested sub-networks with one norm and the target's lm_head, trained together on the mean of their
    losses (SortedNet), on the next token alone. After each exit the most probable token's probability is compared with
    the threshold; the first exit above it gives the draft distribution, the last always does. Hidden states of tokens
    that left early wait, and are read by the deeper layers together with the next token that goes deeper, so each layer
    has the KV cache of the whole text as far as it has read. threshold = 1 always drafts with all layers, 0 with the
    fewest; depth = 0 is plain decoding. SortedNet, from which the training comes, also has sub-networks of less width
    and trains one drawn at random in each step; S2D trains the mean loss of those of less depth, and so is it here. The
    paper has a threshold for each exit, and its draft has embeddings and an lm_head of its own and drafts by argmax;
    here tokens are sampled from the exit's distribution, as an exact verification needs. Kavehzadeh et al. 2024, arXiv
    2407.01955; Valipour et al. 2023, arXiv 2309.00255.
    """

    name, title, paper, sheet = "s2d", "S2D: sorted nested drafts", "2407.01955", "speculative/s2d-sorted"
    drawn, guarantee, sure = "independent", ("collapses",), "medium"

    threshold: float = knob(0.5, 0.0, 1.0, step=0.05, help="probability above which an exit drafts; 1: the last only")
    depth: int = knob(5, 0, 16, step=1, help="draft tokens per round; 0 is plain decoding")

    def __post_init__(self):
        super().__post_init__()
        self._read: list[int] = []  # tokens that the first layers have read
        self._caches: list[HeadCache] = []  # by layer
        self._waiting: list[Tensor] = []  # by group of layers, states [n, width] of the next tokens it has to read
        self._used: list[int] = []  # layers, by draft token of this text

    def state_layers(self, depth):
        return ()

    @classmethod
    def untrained(cls, width, depth):
        return NestedNetwork(HeadShape.like(width), exits_of(depth)).state_dict()

    @classmethod
    def build(cls, weights):
        return NestedNetwork.of(weights)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train all sub-networks on the texts, and measure how often each is right; returns the weights."""
        torch.manual_seed(texts.seed)
        exits = exits_of(texts.depth)
        first = texts.first_layers(exits[-1])
        network = NestedNetwork.copied(first, exits)

        def losses(batch: HeadBatch) -> list[Tensor]:
            found = predictions(network, texts, batch)
            return [token_loss(states, texts.lm_head, labels) / len(exits) for states, labels in found]

        yield from trained(network, texts, losses, HeadTraining(epochs=8, rate=5e-4))
        counts = RankCounts(len(exits), 1)
        with torch.no_grad():
            for batch in texts.held_out():
                for number, (states, labels) in enumerate(predictions(network, texts, batch)):
                    counts.add(number, ranks(states, texts.lm_head, labels))
        shares = ", ".join(f"{share:.1%} after {exit}" for share, exit in zip(counts.shares[:, 0].tolist(), exits))
        yield Note(f"Held-out texts: the most probable token is right in {shares} layers.")
        return {**network.state_dict(), **_facts(first)}

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree, leaf, used = new_tree(lm, self), ROOT, []
        if not self.depth:
            return tree
        self._forget(lm.tokens)
        if not self._read:
            self._prefill(lm)
        for _ in range(min(self.depth, budget)):
            logits, exit = self._cascade(lm, [*lm.tokens, *tree.tokens][len(self._read):])
            added = independent(lm, tree, lm.own_rows(logits, tree, leaf), leaf, 1)
            if not added:
                break
            (leaf,) = added
            used.append(exit)
            if lm.ends(tree.tokens[leaf]):
                break
        self._used += used
        yield from self._figures(lm, tree, used)
        return tree

    def _forget(self, tokens: list[int]) -> None:
        """Drop what was read of tokens that are no longer in the text; the last token of the text is read again."""
        same = next((i for i, pair in enumerate(zip(tokens, self._read)) if pair[0] != pair[1]), len(self._read))
        same = min(same, len(tokens) - 1)
        groups = self.network.groups
        if not self._caches:
            self._caches = [HeadCache() for _ in self.network.layers]
            self._waiting = [self.network.norm.weight.new_empty(0, len(self.network.norm.weight)) for _ in groups]
        before = same
        for number, group in enumerate(groups):
            for layer in group:
                self._caches[layer].crop(same)
            read = self._caches[group[0]].rows
            self._waiting[number] = self._waiting[number][:before - read]
            before = read
        del self._read[same:]

    def _prefill(self, lm: Lane) -> None:
        """Let all layers read the text up to its last token, so that nothing waits."""
        tokens = lm.tokens[:-1]
        for start in range(0, len(tokens), CHUNK):
            rows = lm.embed(tokens[start:start + CHUNK])
            for number in range(len(self.network.groups)):
                rows = self._through(number, rows)
        self._read = tokens

    def _cascade(self, lm: Lane, tokens: list[int]) -> tuple[Tensor, int]:
        """Logits [1, V] after these tokens, which follow those read, and how many layers they took."""
        rows, exits = lm.embed(tokens), self.network.exit_layers
        self._read += tokens
        for number, exit in enumerate(exits):
            rows = self._through(number, rows)
            logits = lm.read_out(self.network.norm(rows[-1:]))
            if exit == exits[-1] or float(logits.softmax(-1).max()) > self.threshold:
                break
        if exit < exits[-1]:
            self._waiting[number + 1] = torch.cat([self._waiting[number + 1], rows])
        return logits, exit

    def _through(self, number: int, rows: Tensor) -> Tensor:
        """The states after a group of layers [n, width], of those that wait for it and then of new rows."""
        rows, self._waiting[number] = torch.cat([self._waiting[number], rows]), self._waiting[number][:0]
        for layer in self.network.groups[number]:
            cache = self._caches[layer]
            positions = torch.arange(cache.rows, cache.rows + len(rows), device=rows.device)
            rows = self.network.layers[layer](rows, NewRows(cache, positions))
            cache.commit()
        return rows

    def _figures(self, lm: Lane, tree, used: list[int]) -> Iterator[Figure]:
        """Layers of each draft token, how often each exit was taken in this text, and rows that wait."""
        if not used:
            return
        labels = list(map(lm.piece, tree.tokens))
        yield Figure("bars", "layers that drafted each token", {"labels": labels, "values": used})
        exits = self.network.exit_layers
        shares = {f"after {exit}": self._used.count(exit) / len(self._used) for exit in exits}
        yield Figure("scalar", "share of draft tokens by exit", {"x": lm.generated, "series": shares})
        deeper = list(zip(self.network.groups, self._waiting))[1:]
        if waiting := {f"layer {group[0] + 1}": len(rows) for group, rows in deeper}:
            yield Figure("scalar", "tokens that deeper layers have not read", {"x": lm.generated, "series": waiting})


def exits_of(depth: int) -> list[int]:
    """The layers after which sub-networks end, for a target with `depth` layers."""
    copied = min(depth, max(EXITS, round(SHARE * depth)))
    return sorted({max(1, round(copied * part / EXITS)) for part in range(1, EXITS + 1)})


def predictions(network: NestedNetwork, texts: HeadTexts, batch: HeadBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """For each exit the inputs of the lm_head [n, width] and the next tokens [n], where the target wrote them."""
    places, labels = ahead(batch, 1)
    for states in network.whole(embedded(texts, batch.ids)):
        yield states[places], labels[places]


def _facts(target: FirstLayers) -> Weights:
    """What the weights do not tell of the layers, as tensors."""
    return {
        "head_dim": torch.tensor(target.head_dim),
        "rope_theta": torch.tensor(target.theta, dtype=torch.float64),
        "rms_norm_eps": torch.tensor(target.eps, dtype=torch.float64),
    }
