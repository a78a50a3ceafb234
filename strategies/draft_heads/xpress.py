"""XPress: a small head refines all guesses of a block together, several times, each time by the guesses before."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Parameter
from torch.nn.functional import silu

from playground.algorithms.draft_heads.blocks.block_drafter import BLOCK, BlockDrafter
from playground.algorithms.draft_heads.blocks.block_network import DFlashNetwork, Reach, part
from playground.algorithms.draft_heads.head_layers import HeadShape
from playground.algorithms.draft_heads.scored_tree import add_chain, chain_figure
from playground.contract import Lane, knob
from playground.events import Figure

PASSES, RANK, RATIO = 6, 16, 2  # where a drafter does not say; the last two of random weights only


class Refiner(Module):
    """From the tokens before all guesses of a block to a bias on their logits. Parameter names are those of vLLM's
    `speculators`.
    """

    def __init__(self, vocabulary: int, draft_vocabulary: int, width: int, block: int, rank: int, inner: int):
        super().__init__()
        self.token_embed = Embedding(vocabulary, rank)
        self.down_h, self.down_g, self.in_proj = (
            Linear(reads, rank, bias=False) for reads in (width, width, 3 * rank)
        )
        self.mix_l = Parameter(torch.zeros(rank, block, block))  # what a row takes of the rows up to it, by channel
        self.mlp_gate, self.mlp_up = (Linear(rank, inner, bias=False) for _ in range(2))
        self.mlp_down, self.readout = Linear(inner, rank, bias=False), Linear(rank, draft_vocabulary, bias=False)

    def known(self, hidden: Tensor) -> Tensor:
        """What all passes read of the outputs [block, width]: each row's own, and their mean."""
        return torch.cat([self.down_h(hidden), self.down_g(hidden.mean(0)).expand(len(hidden), -1)], -1)

    def bias(self, known: Tensor, before: Tensor) -> Tensor:
        """[block, draft vocabulary] for the tokens [block] before each guess."""
        rows = self.in_proj(torch.cat([known, self.token_embed(before)], -1))
        rows = rows + torch.einsum("ckj,jc->kc", self.mix_l.tril(), rows)
        return self.readout(rows + self.mlp_down(silu(self.mlp_gate(rows)) * self.mlp_up(rows)))

    @classmethod
    def of(cls, weights: dict[str, Tensor]) -> Refiner:
        rank, width = weights["down_h.weight"].shape
        sizes = (len(weights[f"{name}.weight"]) for name in ("token_embed", "readout"))
        head = cls(*sizes, width, weights["mix_l"].shape[1], rank, len(weights["mlp_up.weight"]))
        head.load_state_dict(weights)
        return head


class XPressNetwork(DFlashNetwork):
    """DFlash with a refiner."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.refiner_head: Refiner | None = None

    @classmethod
    def of(cls, weights):
        network = super().of({name: each for name, each in weights.items() if not name.startswith("refiner_head.")})
        network.refiner_head = Refiner.of(part(weights, "refiner_head"))
        return network


class XPress(BlockDrafter):
    """DFlash guesses a block in one forward, and a small head then refines all guesses at once, in a few passes. No
    head is bundled and none is trained here: give a published one.

    Each pass reads the tokens that the pass before it guessed, so after k passes the first k guesses no longer change:
    a Jacobi iteration, where `dspark` walks from token to token. A pass costs no layer of the drafter. Weights and
    passes are those of vLLM's `speculators`, which names no paper. depth = 0 is plain decoding. vLLM 2026.
    """

    name, title, paper, sheet = "xpress", "XPress", "vLLM 2026", "draft-heads/public-formats"
    guarantee, new_in = ("collapses",), "2026"

    passes: int = knob(0, 0, 32, step=1, help="passes over a block; 0: as many as the head's config says")

    def __post_init__(self):
        super().__post_init__()
        self._passes = PASSES

    def begin_fitted(self, weights):
        super().begin_fitted(weights)
        self._passes = int(weights["num_jacobi_passes"])

    @classmethod
    def untrained(cls, width, depth):
        layers = cls.state_layers(cls(), depth)
        return DFlashNetwork(HeadShape.like(width), len(layers) * width, [Reach()]).state_dict()

    def beginning(self, lm: Lane):
        weights, width = super().beginning(lm), lm.target_model.width
        refiner = Refiner(lm.vocabulary, lm.vocabulary, width, BLOCK, RANK, RATIO * RANK)
        return weights | {f"refiner_head.{name}": tensor for name, tensor in refiner.state_dict().items()}

    @classmethod
    def build(cls, weights):
        return XPressNetwork.of(weights)

    def draft(self, lm, hidden, rows, tree) -> Iterator:
        network, refiner = self.network, self.network.refiner_head
        base, known = network.read_out(hidden, lm.read_out), refiner.known(hidden)
        text, logits, changed = lm.tokens[-lm.target.behind() - 1:], base, []
        for _ in range(self.passes or self._passes):
            guesses = network.target_ids(logits.argmax(-1)).tolist()
            before = self.tokens_before(text, guesses)
            logits = base + refiner.bias(known, torch.tensor(before, device=hidden.device))
            changed.append(sum(new != old for new, old in zip(network.target_ids(logits.argmax(-1)).tolist(), guesses)))
        add_chain(lm, tree, logits[rows.start:rows.stop], network.target_ids)
        yield chain_figure(lm, tree)
        labels = [f"pass {number}" for number in range(1, len(changed) + 1)]
        yield Figure("bars", "guesses of the block that a pass changed", {"labels": labels, "values": changed})

    def tokens_before(self, text: list[int], guesses: list[int]) -> list[int]:
        """The token before the one that each row guesses; `text` are the block's known tokens and the one before them,
        `guesses` the token that each row guesses.
        """
        known = len(text) - 1
        if self._anchor:
            return [*text[1:], *guesses[known - 1:-1]]
        return [*text, *guesses[known:-1]][:len(guesses)]
