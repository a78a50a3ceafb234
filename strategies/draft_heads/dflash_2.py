"""DFlash 2: a block drafter whose rows read their left neighbour, and whose guesses are chosen in pairs."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from playground.algorithms.draft_heads.blocks.block_drafter import BlockDrafter
from playground.algorithms.draft_heads.blocks.block_network import DFlashLayer, DFlashNetwork, Reach, part
from playground.algorithms.draft_heads.head_layers import HeadCache, HeadShape
from playground.algorithms.draft_heads.scored_tree import chain_figure
from playground.contract import Lane, knob
from playground.engine.host_copies import read_lists

CANDIDATES, RANK, TAPS, GROUPS = 16, 16, 2, 1  # where a drafter does not say; the last three of random weights only
SUBLAYERS = ("attention_conv", "mlp_conv")


class LocalConvolution(Module):
    """Weighted sums of a row and those just before it in its block, before a sublayer and after it. The weights are
    learned for each channel, and corrected for each row and group of channels by what the sublayer reads.
    """

    def __init__(self, width: int, taps: int, groups: int):
        super().__init__()
        self.taps, self.groups = taps, groups
        self.base_kernel = Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = Linear(width, 2 * taps * groups, bias=False)

    def kernels(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the sums before and after the sublayer, [block, taps, width] each, for what the sublayer reads."""
        found = self.kernel_projection(rows).unflatten(-1, (2, self.taps, self.groups))
        spread = found.repeat_interleave(rows.shape[-1] // self.groups, -1)
        return tuple((self.base_kernel + spread).unbind(1))

    @staticmethod
    def mixed(rows: Tensor, kernel: Tensor) -> Tensor:
        """Sums over rows [block, width]; nothing stands before the block."""
        found = torch.zeros_like(rows)
        for tap in range(kernel.shape[1]):
            found[tap:] += rows[:len(rows) - tap] * kernel[tap:, tap]
        return found

    @classmethod
    def of(cls, weights: dict[str, Tensor]) -> LocalConvolution:
        _, taps, width = weights["base_kernel"].shape
        groups = len(weights["kernel_projection.weight"]) // (2 * taps)
        if not groups or width % groups:
            raise ValueError("groups that do not divide the channels")
        made = cls(width, taps, groups)
        made.load_state_dict(weights)
        return made


class DFlash2Layer(DFlashLayer):
    """A layer of DFlash with a local convolution around each sublayer."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.attention_conv: LocalConvolution | None = None
        self.mlp_conv: LocalConvolution | None = None

    def forward(self, rows: Tensor, positions: Tensor, cache: HeadCache, first: int) -> Tensor:
        read = self.input_layernorm(rows)
        before, after = self.attention_conv.kernels(read)
        attended = self.self_attn.over(self.attention_conv.mixed(read, before), positions, cache, first)
        rows = rows + self.attention_conv.mixed(attended, after)
        read = self.post_attention_layernorm(rows)
        before, after = self.mlp_conv.kernels(read)
        return rows + self.mlp_conv.mixed(self.mlp(self.mlp_conv.mixed(read, before)), after)


class CandidateSelector(Module):
    """Scores of the next token's candidates after a token. Parameter names are those of the published drafters."""

    def __init__(self, vocabulary: int, rank: int, width: int):
        super().__init__()
        self.predecessor_codebook = Parameter(torch.zeros(vocabulary, rank))
        self.successor_codebook = Parameter(torch.zeros(vocabulary, rank))
        self.hidden_projection = Linear(width, rank, bias=False)

    def scores(self, logits: Tensor, hidden: Tensor, before: int, candidates: Tensor) -> Tensor:
        """[k] of candidates [k] for a row [width] with logits [V], after the token `before`."""
        pair = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        return logits[candidates] + self.successor_codebook[candidates] @ pair


class DFlash2Network(DFlashNetwork):
    """DFlash with convolutions and a selector."""

    layer_class = DFlash2Layer

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.candidate_selector: CandidateSelector | None = None

    @classmethod
    def of(cls, weights):
        network = super().of({name: tensor for name, tensor in weights.items() if not _is_new(name)})
        for number, layer in enumerate(network.layers):
            for name in SUBLAYERS:
                setattr(layer, name, LocalConvolution.of(part(weights, f"layers.{number}.{name}")))
        selector = part(weights, "candidate_selector")
        (vocabulary, rank), width = selector["predecessor_codebook"].shape, network.fc.out_features
        network.candidate_selector = CandidateSelector(vocabulary, rank, width)
        network.candidate_selector.load_state_dict(selector)
        return network


def _is_new(name: str) -> bool:
    """Whether DFlash has no such weight."""
    return name.startswith("candidate_selector.") or any(f".{each}." in name for each in SUBLAYERS)


class DFlash2(BlockDrafter):
    """DFlash in which a row of the block also reads its left neighbour, and the draft is a path through the best
    candidates of every row. No head is bundled and none is trained here: give a published one.

    A convolution of two taps stands before and after each sublayer. Each row then has a few candidates by its own
    logits, and the one after the token chosen before it is taken: its logit plus a score of the pair, which is a
    product of short vectors of both tokens and the row. Without both it is `dflash`. depth = 0 is plain decoding.
    Z Lab 2026; code of vLLM's `speculators` 0.9.
    """

    name, title, paper, sheet = "dflash_2", "DFlash 2", "Z Lab 2026", "draft-heads/dflash-2"
    guarantee, new_in = ("collapses",), "2026"

    candidates: int = knob(
        0, 0, 64, step=1, help="candidates of a row; 0: as many as the head says; 1 is its best token"
    )

    def __post_init__(self):
        super().__post_init__()
        self._candidates = CANDIDATES

    def begin_fitted(self, weights):
        super().begin_fitted(weights)
        self._candidates = int(weights["selector_top_k"])

    @classmethod
    def untrained(cls, width, depth):
        layers = cls.state_layers(cls(), depth)
        return DFlashNetwork(HeadShape.like(width), len(layers) * width, [Reach()]).state_dict()

    def beginning(self, lm: Lane):
        width = lm.target_model.width
        parts = {f"layers.0.{name}": LocalConvolution(width, TAPS, GROUPS) for name in SUBLAYERS}
        parts["candidate_selector"] = CandidateSelector(lm.vocabulary, RANK, width)
        named = {f"{name}.{key}": each for name, made in parts.items() for key, each in made.state_dict().items()}
        return super().beginning(lm) | named

    @classmethod
    def build(cls, weights):
        return DFlash2Network.of(weights)

    def draft(self, lm, hidden, rows, tree) -> Iterator:
        network, block = self.network, lm.tokens[-lm.target.behind():]
        base = network.read_out(hidden, lm.read_out)
        found = base.topk(min(self.candidates or self._candidates, base.shape[-1])).indices
        for row in rows:
            scores = network.candidate_selector.scores(base[row], hidden[row], self.before(block, row), found[row])
            share, place = scores.softmax(-1).max(-1)
            share, token = read_lists(share, found[row][place])
            block.append(token)
            tree.add(token, len(tree) - 1, confidence=share)
            if lm.ends(token):
                break
        yield chain_figure(lm, tree)
