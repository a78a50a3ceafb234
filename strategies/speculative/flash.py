"""FLASH: a draft head that predicts several hidden states in one forward, and reads an old prompt compressed."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Linear, Parameter, Sequential, SiLU
from torch.nn.functional import linear, scaled_dot_product_attention, smooth_l1_loss

from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.feature_drafter import FollowedText
from playground.algorithms.draft_heads.feature_networks import FeatureNetwork, shape_of_attention, soft_loss
from playground.algorithms.draft_heads.head_layers import HeadShape, NewRows, Place, SelfAttention
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    ahead,
    embedded,
    ranks,
    trained,
)
from playground.algorithms.speculative.drafting import independent, new_tree
from playground.contract import Lane, knob
from playground.contract.token_tree import ROOT
from playground.events import Figure, Note

OFFSETS, LATENTS = 5, 8  # hidden states per forward; vectors that an old prompt becomes
WINDOW = 16  # last tokens of a prompt that are not compressed in training
TOKEN_LOSS = 0.1  # weight of the loss on tokens beside that on hidden states
Latents = tuple[Tensor, Tensor]
"""Key and value states [.., kv_heads, latents, head_dim] of a compressed span."""


class FlashNetwork(FeatureNetwork):
    """One attention over the text, and one feed-forward network that gives all offsets at once.

    Row t reads the state of token t and the embedding of token t + 1. Block i of its output predicts the state of
    token t + 1 + i. The head's own output is read back by its first block alone.
    """

    def __init__(self, shape: HeadShape, offsets: int, latents: int):
        super().__init__()
        self.width = shape.width
        self.fc, self.self_attn = Linear(2 * shape.width, shape.width), SelfAttention(shape)
        inner = 4 * shape.width
        self.mlp = Sequential(Linear(shape.width, inner), SiLU(), Linear(inner, offsets * shape.width))
        self.queries = Parameter(torch.randn(latents, shape.width) * shape.width**-0.5)

    def forward(self, embeddings: Tensor, features: Tensor, place: Place) -> Tensor:
        rows = self.fc(torch.cat([embeddings, features[..., :self.width]], -1))
        return self.mlp(rows + self.self_attn(rows, place))

    def latents(self, states: Tensor, span: Tensor) -> Latents:
        """The span of a text as few vectors: averages of its states [.., tokens, width], weighted by learned queries.

        `span` [.., tokens] marks it. The vectors stand at the first positions.
        """
        weights = self.queries @ states.transpose(-1, -2)
        # finite, so that a text without a span gives no NaN; its latents are not attended to
        weights = weights.masked_fill(~span[..., None, :], torch.finfo(weights.dtype).min)
        rows = weights.softmax(-1) @ states
        return self.self_attn.states(rows, torch.arange(len(self.queries), device=rows.device))[1:]

    @classmethod
    def of(cls, weights: dict[str, Tensor]) -> FlashNetwork:
        """The network with these weights. Raises KeyError or RuntimeError if they are of another network."""
        width = weights["fc.bias"].shape[0]
        offsets, latents = weights["mlp.2.bias"].shape[0] // width, weights["queries"].shape[0]
        network = cls(shape_of_attention(weights, "", width), offsets, latents)
        network.load_state_dict(weights)
        return network


class CompressedTexts:
    """Whole texts, of which the first tokens are seen through their latents alone."""

    def __init__(self, latents: Latents, span: Tensor):
        count = span.shape[1]
        self.positions = torch.arange(count)
        seen = torch.ones(count, count, dtype=torch.bool).tril() & ~span[:, None]
        compressed = span.any(1)[:, None, None].expand(-1, count, latents[0].shape[-2])
        self.mask = torch.cat([compressed, seen], -1)[:, None] | torch.cat(
            [torch.zeros(count, latents[0].shape[-2], dtype=torch.bool), torch.eye(count, dtype=torch.bool)], -1
        )  # a row sees itself, so that none sees nothing
        self.latents = latents

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = (torch.cat(pair, -2) for pair in zip(self.latents, (keys, values)))
        return scaled_dot_product_attention(query, keys, values, self.mask, enable_gqa=True)


@dataclass
class RowsAfterLatents(NewRows):
    """New rows over a cache, before which the latents of a compressed span stand."""

    latents: Latents | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.latents is None:
            return super().attend(query, keys, values)
        before, count = self.cache.rows + self.latents[0].shape[-2], query.shape[-2]
        keys, values = (torch.cat(pair, -2) for pair in zip(self.latents, self.cache.write(keys, values)))
        mask = torch.ones(count, before + count, dtype=torch.bool, device=query.device).tril(before)
        return scaled_dot_product_attention(query[None], keys[None], values[None], mask, enable_gqa=True)[0]


class CompressedText(FollowedText):
    """The head's cache over a text whose first `span` tokens are compressed."""

    def __init__(self, network: FlashNetwork, layer: int, states, span: int):
        super().__init__(network, (layer,), skip=span)
        self.span, self.compressed = span, None
        if span:
            rows = states.of(layer, 0)[:span]
            self.compressed = network.latents(rows, torch.ones(span, dtype=torch.bool, device=rows.device))

    def place(self, positions: Tensor) -> RowsAfterLatents:
        return RowsAfterLatents(self.cache, positions, latents=self.compressed)


class Flash(DraftHead):
    """A head over the target's last hidden states drafts several tokens in one forward, and reads a long prompt as a
    few vectors.

    Its output at the newest token predicts the next `block` hidden states, from which the target's lm_head reads as
    many draft tokens; none of them knows the others. For more tokens the block is read back with its predicted states,
    so `depth` tokens take depth / block forwards. With span = prompt all but the last `window` tokens of the prompt
    enter the head as eight averages with learned weights. block = 1 and span = none draft one state after the other, as
    EAGLE; depth = 0 is plain decoding. The paper is about images, and compresses their tokens. Text has none, so the
    compression is adapted, and no speed-up of the paper carries over. The loop over blocks and the residual around the
    attention are reconstructed; the averages stand at the first positions and no other position changes, while the
    paper numbers them anew. Wang et al. 2025, arXiv 2505.12728.
    """

    name, title, paper, sheet = "flash", "FLASH: blocks of draft states", "2505.12728", "speculative/flash"
    drawn, guarantee, reconstruction, sure = "independent", ("collapses",), True, "low"

    block: int = knob(OFFSETS, 1, 8, step=1, help="draft tokens per forward, at most those that were trained")
    depth: int = knob(5, 0, 20, step=1, help="draft tokens per round; 0 is plain decoding")
    span: str = knob("none", choices=("none", "prompt"), help="what the head reads compressed")
    window: int = knob(WINDOW, 2, 256, step=1, help="last tokens of the prompt that are not compressed")

    def __post_init__(self):
        super().__post_init__()
        self._text: CompressedText | None = None
        self._tested, self._accepted = [], []  # by offset, in this text

    @classmethod
    def untrained(cls, width, depth):
        return FlashNetwork(HeadShape.like(width), OFFSETS, LATENTS).state_dict()

    @classmethod
    def build(cls, weights):
        return FlashNetwork.of(weights)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train all offsets on the target's hidden states and distributions, half of the batches with their prompts
        compressed; returns the weights.
        """
        torch.manual_seed(texts.seed)
        network = FlashNetwork(HeadShape.like(texts.width), OFFSETS, LATENTS)

        def losses(batch: HeadBatch) -> list[Tensor]:
            compressed = int(batch.ids.sum()) % 2 == 0  # a coin that is the same after an interruption
            found = offsets_of(network, texts, batch, compressed)
            return [_offset_loss(guess, true, texts.lm_head) / OFFSETS for guess, true, _ in found]

        yield from trained(network, texts, losses, HeadTraining(epochs=12, rate=1e-3, noise=0.1))
        for compressed in (False, True):
            yield Note("With compressed prompts:" if compressed else "With whole prompts:")
            counts = RankCounts(OFFSETS, 1)
            with torch.no_grad():
                for batch in texts.held_out():
                    for offset, (guess, _, labels) in enumerate(offsets_of(network, texts, batch, compressed)):
                        counts.add(offset, ranks(guess, texts.lm_head, labels))
            yield counts.note()
        return network.state_dict()

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree, leaf = new_tree(lm, self), ROOT
        depth = min(self.depth, budget)
        if depth < 1:
            return tree
        if self._text is None:
            self._text = CompressedText(self.network, lm.depth, lm.target.states, self._span(lm))
        states, blocks = self._states(self._text.catch_up(lm)), 0
        while leaf is not None and len(tree) < depth:
            first, states, blocks = len(tree), states[:min(self.block, depth - len(tree))], blocks + 1
            leaf = self._add_block(lm, tree, leaf, states)
            if leaf is not None and len(tree) < depth:
                position = len(lm.tokens) - 1 + first
                states = self._states(self._text.feed(lm, tree.tokens[first:], states, position))
        yield from self._figures(lm, blocks)
        return tree

    def _states(self, output: Tensor) -> Tensor:
        """The predicted states after the last row of an output, [offsets, width]."""
        return output[-1].unflatten(-1, (-1, self.network.width))

    def _add_block(self, lm: Lane, tree, leaf: int, states: Tensor) -> int | None:
        """Add the token of each state to the chain; returns the last node, None if no token can follow it."""
        for logits in lm.read_out(states).split(1):
            added = independent(lm, tree, lm.own_rows(logits, tree, leaf), leaf, 1)
            if not added or lm.ends(tree.tokens[added[0]]):
                return None
            (leaf,) = added
        return leaf

    def observe(self, tree, rows, verdict) -> None:
        """Count how often each offset of a block was tested and accepted."""
        for test in verdict.tests:
            offset = test.node % self.block
            grown = max(0, offset + 1 - len(self._tested))
            self._tested, self._accepted = self._tested + [0] * grown, self._accepted + [0] * grown
            self._tested[offset] += 1
            self._accepted[offset] += test.kept

    def _span(self, lm: Lane) -> int:
        """Tokens at the beginning of the text that are compressed."""
        span = min(lm.prompt_length - self.window, lm.target.states.length - 1)
        fits = self.span == "prompt" and span > len(self.network.queries) and not lm.target.states.start
        return span if fits else 0

    def _figures(self, lm: Lane, blocks: int) -> Iterator[Figure]:
        series = {"forwards": blocks, "compressed tokens": self._text.span}
        yield Figure("scalar", "forwards of the head, and compressed tokens", {"x": lm.generated, "series": series})
        if self._tested:
            shares = [accepted / max(1, tested) for accepted, tested in zip(self._accepted, self._tested)]
            labels = [f"offset {offset}" for offset in range(1, len(shares) + 1)]
            yield Figure("bars", "accepted / tested, by place in the block", {"labels": labels, "values": shares})


def offsets_of(
    network: FlashNetwork, texts: HeadTexts, batch: HeadBatch, compressed: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each offset the predicted states [n, width], the target's, and the tokens after them [n]."""
    states = batch.states[texts.depth]
    span = spans(batch, len(network.queries)) if compressed else torch.zeros_like(batch.written)
    place = CompressedTexts(network.latents(states, span), span)
    following = embedded(texts, batch.ids.roll(-1, 1))
    output = network(following, states, place).unflatten(-1, (-1, network.width))
    for offset in range(min(output.shape[-2], batch.ids.shape[1] - 2)):
        places, labels = ahead(batch, offset + 2)
        yield output[..., offset, :][places], states.roll(-1 - offset, 1)[places], labels[places]


def spans(batch: HeadBatch, least: int) -> Tensor:
    """What is compressed of each text [texts, tokens]: the prompt but for its last tokens, if that is long enough."""
    starts = batch.written.int().argmax(1)
    ends = torch.where(starts - WINDOW > least, starts - WINDOW, 0)
    return torch.arange(batch.ids.shape[1]) < ends[:, None]


def _offset_loss(guess: Tensor, true: Tensor, lm_head: Tensor) -> Tensor:
    if not len(guess):
        return guess.sum() * 0
    with torch.no_grad():
        teacher = linear(true, lm_head).softmax(-1)
    return smooth_l1_loss(guess, true) + TOKEN_LOSS * soft_loss(linear(guess, lm_head), teacher)
