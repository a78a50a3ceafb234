"""A look into a model at one place of a text: what each layer would say next, and which tokens its heads attend to.

Logit lens (nostalgebraist 2020; Belrose et al. 2023, arXiv 2303.08112): the hidden state that enters a layer goes
straight through the final norm and the head. The last row has seen all layers and is the model's own. Attention is that
of the last token read, over a cache that holds everything, whatever the lane's own cache holds.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.special import entr

from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.errors import Refusal

TOP = 5  # tokens named for each layer
PIECE = 512  # tokens of the text that go through in one forward


@dataclass
class Lens:
    """What one layer would say next."""

    entropy: float  # nats
    chosen: float  # probability of the token that was chosen
    top: list[tuple[int, str, float]]  # id, piece, probability


@dataclass
class Inside:
    """`layers` begin with the embedding, so there is one more than the model has; attention [layers][kv_heads][tokens]
    sums to 1 over tokens.
    """

    pieces: list[str]  # the tokens that were read
    layers: list[Lens]
    attention: list[list[list[float]]]


def look(model: Model, tokens: list[int], chosen: int) -> Inside:
    """Look at the place after `tokens`, where `chosen` was chosen. Raises Refusal where there is nothing to look at."""
    if getattr(model, "fills", False):
        raise Refusal(
            f"{model.name} is computed, not a network of layers: there is nothing inside to look at.", "model"
        )
    if not 0 < len(tokens) <= model.context:
        raise Refusal(
            f"A look inside needs between 1 and {model.context} tokens before the place, not {len(tokens)}.", "prompt"
        )
    if not all(0 <= token < model.vocabulary for token in [*tokens, chosen]):
        raise Refusal(f"These are not tokens of {model.name}: run the prompt again with this model.", "model")
    hidden, attention = _last_row(model, tokens)
    p = model.read_out(hidden).softmax(-1)
    return Inside(
        model.tokens.pieces(tokens),
        _lenses(model, p, chosen),
        [[_rounded(head) for head in layer] for layer in attention],
    )


def _last_row(model: Model, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Hidden states [depth + 1, d] of the last token before each layer and after the last; its attention, [kv_heads,
    tokens] a layer.
    """
    store, last = model.new_store(), len(tokens) - 1
    for start in range(0, last, PIECE):
        piece = tokens[start:min(start + PIECE, last)]
        model.forward([ForwardInput(store, piece, list(range(-1, len(piece) - 1)), last_only=True)])
        store.keep(len(piece) - 1)
    _, captured = model.forward(
        [ForwardInput(store, tokens[-1:], [-1], watch=lambda position: True)],
        LayerPlan(capture=frozenset(range(model.depth + 1))),
    )
    weights = store.attention[-1].layers
    hidden = torch.cat([captured[layer] for layer in range(model.depth + 1)])
    return hidden, [weights[layer][:, 0] / weights[layer][:, 0].sum(-1, keepdim=True) for layer in range(model.depth)]


def _lenses(model: Model, p: Tensor, chosen: int) -> list[Lens]:
    values, ids = p.topk(min(TOP, p.shape[-1]), -1)
    entropies, chances = entr(p).sum(-1).tolist(), p[:, chosen].tolist()
    named = [
        [(token, model.tokens.piece(token), round(value, 6)) for token, value in zip(*row)]
        for row in zip(ids.tolist(), values.tolist())
    ]
    return [Lens(round(entropy, 4), round(chance, 6), top) for entropy, chance, top in zip(entropies, chances, named)]


def _rounded(weights: Tensor) -> list[float]:
    """Three decimals are what a shade can show; most weights of a long text then are a plain 0."""
    return [round(weight, 3) or 0 for weight in weights.tolist()]
