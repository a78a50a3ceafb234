"""Hidden Transfer: pseudo hidden states of the next tokens, refined by the target's own upper layers."""
from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import cosine_similarity, linear

from playground.algorithms.draft_heads.accuracy_tree import Path, best_paths, rank_tree
from playground.algorithms.draft_heads.draft_head import MEASURED, DraftHead
from playground.algorithms.draft_heads.feature_networks import soft_loss
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    ranks,
    trained,
)
from playground.algorithms.draft_heads.pseudo_rows import ProbedGuesses, row_groups
from playground.contract import Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.host_copies import read_lists
from playground.events import Figure

STEPS, RANKS = 3, 10
DECAY = 0.8  # weight of each further step in the loss


class Transfer(Module):
    """A linear map for each step, from a token's hidden state to that of the token so many positions further on."""

    def __init__(self, steps: int, width: int):
        super().__init__()
        self.transfer = ModuleList(Linear(width, width, bias=False) for _ in range(steps))
        for step in self.transfer:
            torch.nn.init.eye_(step.weight)

    def forward(self, states: Tensor) -> Tensor:
        """Pseudo hidden states [..., steps, width] of states [..., width]."""
        return torch.stack([step(states) for step in self.transfer], -2)

    def after(self, batch: HeadBatch, texts: HeadTexts, layer: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each step: its outputs [n, width] after the last layer, the target's own there, and the right tokens."""
        groups = row_groups(batch, len(self.transfer))
        index = groups.cuts[:, :, None].expand(-1, -1, texts.width)
        rows = self(batch.states[layer].gather(1, index)).flatten(1, 2)
        found = texts.frozen.hidden(batch.ids, rows, groups.positions, groups.seen(batch.ids.shape[1]), layer)
        yield from groups.each(found, batch, texts.depth)


class HiddenTransfer(DraftHead):
    """A linear map per step predicts the hidden states that the next tokens will have in a middle layer, and the
    target's remaining layers refine them until its lm_head reads draft tokens.

    The pseudo states attend to the text and to each other, and never enter the KV cache. With `phase` one, one forward
    verifies and drafts, as in the paper: every draft token carries pseudo states, and those of the last accepted one
    are the next draft. With two they are made after the verification, for that token alone, in a second, short forward:
    the same draft tokens from a quarter of the rows. All rows of a forward pass all layers here, so in one forward the
    pseudo states' rows also pass the lower layers, without effect. The tree combines the best tokens of each step as in
    Medusa. Layer, tree and weights of the loss are reconstructed. nodes = 0 is plain decoding. Wu et al. 2024, arXiv
    2404.12022.
    """

    name, title, paper, sheet = "hidden_transfer", "Hidden Transfer", "2404.12022", "draft-heads/hidden-transfer"
    guarantee, exits_early = ("collapses",), True
    reconstruction, sure = True, "medium"

    nodes: int = knob(16, 0, 64, step=1, help="draft tokens in the tree; 0 is plain decoding")
    depth: int = knob(STEPS, 1, 8, step=1, help="steps that are used, at most those that were trained")
    ranks: int = knob(RANKS, 1, RANKS, step=1, help="tokens per step that may enter the tree; 1 makes it a chain")
    phase: str = knob("two", choices=("one", "two"), help="draft in the forward that verifies, or in a second one")

    def __post_init__(self):
        super().__post_init__()
        self._guesses = ProbedGuesses()  # of the last forward
        self._layer: int | None = None  # of weights that say so
        self._pseudo: tuple[int, Tensor] | None = None  # position of the first pseudo state, and all [n, width]

    def begin_fitted(self, weights):
        self._layer = int(weights["layer"])

    def state_layers(self, depth):
        return (transfer_layer(depth) if self._layer is None else self._layer,)

    @classmethod
    def untrained(cls, width, depth):
        halving = 0.5 ** torch.arange(1, RANKS + 1)
        accuracy = torch.stack([halving * DECAY**step for step in range(STEPS)])
        return {**Transfer(STEPS, width).state_dict(), MEASURED: accuracy, "layer": torch.tensor(transfer_layer(depth))}

    @classmethod
    def build(cls, weights):
        own = {name: tensor for name, tensor in weights.items() if name.startswith("transfer.")}
        network = Transfer(len(own), weights["transfer.0.weight"].shape[0])
        network.load_state_dict(own)
        network.accuracy = weights[MEASURED].float()  # no buffer: it stays on the host, which plans the tree
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the maps through the frozen upper layers on the target's distributions; returns the weights."""
        network, layer = Transfer(STEPS, texts.width), transfer_layer(texts.depth)

        def losses(batch: HeadBatch) -> list[Tensor]:
            found = []
            for step, (guess, true, _) in enumerate(network.after(batch, texts, layer)):
                teacher = linear(true, texts.lm_head).softmax(-1)
                found.append(DECAY**step * soft_loss(linear(guess, texts.lm_head), teacher))
            return found

        yield from trained(network, texts, losses, HeadTraining(epochs=6, rate=1e-3))
        counts = RankCounts(STEPS, RANKS)
        with torch.no_grad():
            for batch in texts.held_out():
                for step, (guess, _, labels) in enumerate(network.after(batch, texts, layer)):
                    counts.add(step, ranks(guess, texts.lm_head, labels))
        yield counts.note()
        return {**network.state_dict(), MEASURED: counts.shares, "layer": torch.tensor(layer)}

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        if not self.nodes:
            return TokenTree(self.name)
        if self.phase == "two":
            return (yield from self._draft_apart(lm, budget))
        logits, unread = self._guesses.after(lm), lm.target.behind()
        tree = TokenTree(self.name)
        if steps := min(len(logits), self.depth, budget):
            tree = yield from self._tree(lm, logits[:steps], unread)
        tree.probes, tree.entering = self._pseudo_rows(tree, budget), (self.state_layers(lm.depth)[0], self.network)
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._guesses.read(tree, rows, verdict)

    def _pseudo_rows(self, tree: TokenTree, budget: int) -> dict[int, Tensor]:
        """Placeholders for the pseudo states of the root and of each node."""
        steps = min(self.depth, len(self.network.transfer))
        empty = self.network.transfer[0].weight.new_zeros(steps, self.network.transfer[0].in_features)
        counts = {node: min(steps, budget - len(tree.path(node)) - 1) for node in (ROOT, *range(len(tree)))}
        return {node: empty[:count] for node, count in counts.items() if count > 0}

    def _draft_apart(self, lm: Lane, budget: int) -> Iterator:
        """The draft tree from pseudo states of the last token that was read, in a forward of their own."""
        states, unread, layer = lm.target.states, lm.target.behind(), self.state_layers(lm.depth)[0]
        steps = min(unread - 1 + min(self.depth, budget), len(self.network.transfer))
        if steps < unread:  # the first steps guess what is known already
            return TokenTree(self.name)
        if self._pseudo:
            yield self._likeness(lm, layer)
        pseudo = self.network(states.of(layer, states.length - 1))[0, :steps]
        self._pseudo = states.length, pseudo
        logits = (yield lm.target.resume(layer, pseudo))[unread - 1:]
        return (yield from self._tree(lm, logits, unread))

    def _tree(self, lm: Lane, logits: Tensor, unread: int) -> Iterator:
        """The tree of the best tokens of each step, from the steps' logits [n, V] after the unread tokens."""
        shares, tokens = read_lists(*logits.softmax(-1).topk(min(self.ranks, lm.vocabulary)))
        accuracy = self.network.accuracy[unread - 1:][:len(logits), :self.ranks]
        paths = _paths(tuple(map(tuple, accuracy.tolist())), self.nodes)
        tree, _ = rank_tree(self.name, shares, tokens, paths, lm.ends)
        yield self._confidence(lm, shares)
        return tree

    def _likeness(self, lm: Lane, layer: int) -> Figure:
        """Cosine of the pseudo states of the last round and the true ones, of tokens that have been read since."""
        first, pseudo = self._pseudo
        true = lm.target.states.of(layer, first)[:len(pseudo)]
        found = cosine_similarity(pseudo[:len(true)], true, dim=-1).tolist() if lm.target.states.length > first else []
        series = {f"step {step}": value for step, value in enumerate(found, 1)}
        return Figure("scalar", "cosine of pseudo and true hidden states", {"x": lm.generated, "series": series})

    def _confidence(self, lm: Lane, shares: list[list[float]]) -> Figure:
        series = {f"step {step}": best for step, (best, *_) in enumerate(shares, 1)}
        return Figure("scalar", "probability of each step's best token", {"x": lm.generated, "series": series})


def transfer_layer(depth: int) -> int:
    """The layer whose inputs are predicted: the middle one."""
    return depth // 2


@cache
def _paths(accuracy: tuple[tuple[float, ...], ...], nodes: int) -> list[Path]:
    return best_paths([list(shares) for shares in accuracy], nodes)
