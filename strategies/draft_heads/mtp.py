"""Multi-token prediction: the layers that a checkpoint was trained with draft for it."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from playground.algorithms.draft_heads.head_layers import HeadShape, WholeTexts
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    ahead,
    embedded,
    measured,
    token_loss,
    trained,
)
from playground.algorithms.draft_heads.mtp_head import MtpBlock, MtpHead
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import TokenTree
from playground.engine.host_copies import read_lists
from playground.errors import Refusal
from playground.events import Figure

STEPS = 3  # tokens that a layer trained here guesses, as in the paper
DECAY = 0.6  # weight of a step's loss in that of the step before
Guesses = list[tuple[Tensor, Tensor]]


class Mtp(Drafter):
    """The layers for multi-token prediction that ship inside a checkpoint guess one token each. No bundled model
    has such layers: load a checkpoint with num_mtp_layers, give a published head, or train a layer with `fit mtp`.

    A checkpoint's layers were trained with the target, and the transformers library reads them from its files. Each
    reads the state of the layer before it and the embedding of the token that was guessed last, so the guesses form a
    chain. Rows that read a rejected token are computed again. `fit` trains one layer for a target that stays as it is,
    on the target's own texts and for three tokens in a row, the loss of each weighing 0.6 of that of the one before it;
    a published head of this kind, given with `--draft`, works in the same way. Unlike the published ones, which start
    from a checkpoint's layer, that of `fit` starts from random weights. Guesses are the most probable tokens, verified
    as any other draft tokens are. depth = 0 is plain decoding. DeepSeek-AI 2024, arXiv 2412.19437; Cai et al. 2025,
    arXiv 2509.18362.
    """

    fitted_to_target, prefers_trained, needs = True, True, ("trained",)
    name, title, paper, sheet = "mtp", "Multi-token prediction", "2412.19437", "draft-heads/public-formats"
    guarantee = ("collapses",)

    depth: int = knob(8, 0, 8, step=1, help="most layers that are used; 0 is plain decoding")

    def __post_init__(self):
        self._text: MtpText | None = None
        self._head: tuple[MtpBlock, int] | None = None  # of a published head, with its number of tokens

    def begin_fitted(self, weights):
        self._head = MtpBlock.of(weights), int(weights["steps"])

    def state_layers(self, depth):
        return (depth,)

    def check_target(self, model):
        if not (self._head or model.mtp_count):
            raise Refusal(
                f"{model.name} has no layers for multi-token prediction: choose a model whose config says "
                "num_mtp_layers, give a head with --draft, run `python -m playground fit mtp` with this model, or "
                "choose another drafter.",
                self.name,
            )

    @classmethod
    def untrained(cls, width: int, depth: int) -> dict[str, Tensor]:
        """Weights to start a training from, for a target of this hidden size."""
        return {**MtpBlock(HeadShape.like(width)).state_dict(), "steps": torch.tensor(STEPS)}

    @classmethod
    def build(cls, weights: dict[str, Tensor]) -> MtpBlock:
        """The layer with these weights. Raises KeyError or RuntimeError if they are of another network."""
        return MtpBlock.of(weights)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train one layer on the tokens that the target wrote, and measure it; returns the weights."""
        torch.manual_seed(texts.seed)
        block, total = cls.build(cls.untrained(texts.width, texts.depth)), sum(DECAY ** step for step in range(STEPS))

        def losses(batch: HeadBatch) -> list[Tensor]:
            return [
                DECAY ** step / total * token_loss(states, texts.lm_head, labels)
                for step, (states, labels) in enumerate(guessed(block, texts, batch))
            ]

        yield from trained(block, texts, losses, HeadTraining(epochs=6, rate=1e-3))
        yield measured(texts, STEPS, lambda batch: guessed(block, texts, batch)).note()
        return {**block.state_dict(), "steps": torch.tensor(STEPS)}

    def _layers(self, lm: Lane) -> Any:
        """Those of the head that was given, or of the checkpoint."""
        if self._head is None:
            return lm.target_model.mtp
        block, steps = self._head
        block.to(device=lm.target_model.device, dtype=lm.target_model.dtype).eval().requires_grad_(False)
        return MtpHead(block, steps, lm.embed, lm.read_out)

    @torch.inference_mode()
    def propose(self, lm: Lane, budget) -> Iterator:
        tree = TokenTree(self.name)
        if not (self.depth and budget > 0 and lm.target.behind()):
            return tree
        if self._text is None:
            self._text = MtpText(self._layers(lm), self.depth)
        guesses = self._text.guesses(lm)[:budget]
        for token, share in guesses:
            tree.add(token, len(tree) - 1, confidence=share)
            if lm.ends(token):
                break
        if len(tree):
            data = {"labels": list(map(lm.piece, tree.tokens)), "values": list(tree.confidence)}
            yield Figure("bars", "probability of each draft token, by its layer", data)
        return tree


class MtpText:
    """The layers' cache over a text.

    Row i reads the target's state of token i, and layer k beside it token i + k + 1.
    """

    def __init__(self, layers: Any, depth: int):
        self.layers, self.depth = layers, min(depth, layers.count)
        self._restart(0)

    def _restart(self, start: int) -> None:
        self.cache = self.layers.new_cache()
        self.start, self.rows = start, 0  # position of the first row, and how many there are
        self.assumed: list[int] = []  # the text and the guesses that the rows were computed with

    def guesses(self, lm: Lane) -> list[tuple[int, float]]:
        """The most probable next tokens with their probabilities; those that are known already are left out."""
        states, tokens = lm.target.states, lm.tokens
        if states.start != self.start:
            self._restart(states.start)
        self._drop_stale(tokens, states.length)
        first = self.start + self.rows
        hidden, text = states.of(lm.depth, first), list(tokens)
        shares: list[float] = []
        for number in range(self.depth):
            read = text[first + number + 1:states.length + number + 1]
            hidden = self.layers.states(number, hidden, read, first + number + 1, self.cache)
            if len(text) == states.length + number + 1:
                token, share = _best(self.layers.logits(hidden[-1:])[:, :lm.vocabulary])
                text.append(token)
                shares.append(share)
        self.rows, self.assumed = states.length - self.start, text
        return list(zip(text[len(tokens):], shares))

    def _drop_stale(self, tokens: list[int], length: int) -> None:
        """Drop the rows of which some layer read a token that is not in the text, and the last if nothing is new."""
        pairs = zip(tokens, self.assumed)
        same = next((i for i, (own, read) in enumerate(pairs) if own != read), min(len(tokens), len(self.assumed)))
        valid = max(0, min(self.rows, same - self.depth - self.start, length - 1 - self.start))
        if valid < self.rows:
            self.cache.crop(valid - self.rows)
            self.rows = valid


def guessed(block: MtpBlock, texts: HeadTexts, batch: HeadBatch) -> Guesses:
    """For each step the inputs of the lm_head [n, width] and the tokens [n] that the target wrote there."""
    states, found = batch.states[texts.depth], []
    for step in range(1, STEPS + 1):
        states = block(embedded(texts, batch.ids.roll(-step, 1)), states, WholeTexts(batch.ids.shape[1]))
        places, labels = ahead(batch, step + 1)
        found.append((states[places], labels[places]))
    return found


def _best(logits: Tensor) -> tuple[int, float]:
    """The most probable token of a row [1, V], and its probability."""
    share, token = read_lists(*logits.softmax(-1)[0].max(-1))
    return token, share
