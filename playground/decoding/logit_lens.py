"""Inspects a model at one position of a text: the logit lens of every layer and the attention of every head.

Logit lens (nostalgebraist 2020; Belrose et al. 2023, arXiv 2303.08112): the hidden state before a layer is passed
directly through the final norm and the lm_head. The last entry, after all layers, is the model's own distribution.
Attention is that of the last token over a full KV cache, even if the cache of the lane is not full.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.special import entr

from playground.decoding.stream import chunk_of
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.errors import Refusal

TOP = 5  # tokens listed for each layer


@dataclass
class Lens:
    """The logit lens of one layer."""

    entropy: float  # nats
    chosen: float  # probability of the chosen token
    top: list[tuple[int, str, float]]  # id, piece, probability


@dataclass
class Inside:
    """The logit lens and the attention at one position."""

    pieces: list[str]  # of the tokens before the position
    layers: list[Lens]  # depth + 1, from the embedding to the output of the last layer
    attention: list[list[list[float]]]  # [attention layers][kv_heads][tokens], sums to 1 over tokens
    attending: list[int] = field(default_factory=list)  # decoder layers with attention; empty: all, or none at all


def look(model: Model, tokens: list[int], chosen: int) -> Inside:
    """Inspect the position after `tokens`, at which `chosen` was chosen.

    Raises Refusal for a model without layers, tokens of another model, and no or too many tokens.
    """
    if getattr(model, "fills", False):
        raise Refusal(f"{model.name} is a table, not a network of layers: choose another model.", "model")
    if not 0 < len(tokens) <= model.context:
        raise Refusal(
            f"The position must have between 1 and {model.context} tokens before it, not {len(tokens)}.", "prompt"
        )
    if not all(0 <= token < model.vocabulary for token in [*tokens, chosen]):
        raise Refusal(f"These are not tokens of {model.name}: run the prompt again with this model.", "model")
    hidden, attention = _last_token(model, tokens)
    p = model.read_out(hidden).softmax(-1)
    return Inside(
        model.tokens.pieces(tokens),
        _lenses(model, p, chosen),
        [[_rounded(head) for head in layer] for layer in attention],
        list(model.recurrence.cache_layers if model.recurrence else range(model.depth)),
    )


def _last_token(model: Model, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Hidden states [depth + 1, hidden_size] and attention, [kv_heads, tokens] for each layer, of the last token.

    The hidden states are those before each layer and after the last; recurrent layers have no attention.
    """
    store, last = model.new_store(), len(tokens) - 1
    chunk = chunk_of(model)
    for start in range(0, last, chunk):
        piece = tokens[start:min(start + chunk, last)]
        model.forward([ForwardInput(store, piece, list(range(-1, len(piece) - 1)), last_only=True)])
        store.commit(len(piece) - 1)
    _, captured = model.forward(
        [ForwardInput(store, tokens[-1:], [-1], watch=lambda position: True)],
        LayerPlan(capture=frozenset(range(model.depth + 1))),
    )
    weights = store.attention[-1].layers if store.attention else {}
    hidden = torch.cat([captured[layer] for layer in range(model.depth + 1)])
    return hidden, [weights[layer][:, 0] / weights[layer][:, 0].sum(-1, keepdim=True) for layer in range(store.depth)]


def _lenses(model: Model, p: Tensor, chosen: int) -> list[Lens]:
    values, ids = p.topk(min(TOP, p.shape[-1]), -1)
    entropies, probabilities = entr(p).sum(-1).tolist(), p[:, chosen].tolist()
    tops = [
        [(token, model.tokens.piece(token), round(value, 6)) for token, value in zip(*layer)]
        for layer in zip(ids.tolist(), values.tolist())
    ]
    return [
        Lens(round(entropy, 4), round(probability, 6), top)
        for entropy, probability, top in zip(entropies, probabilities, tops)
    ]


def _rounded(weights: Tensor) -> list[float]:
    """Three decimals suffice for a colour scale, and turn most weights of a long text into a short 0."""
    return [round(weight, 3) or 0 for weight in weights.tolist()]
