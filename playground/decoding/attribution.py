"""Attribution of one token to the words of its prompt, by leave-one-out.

Each word is removed from the prompt in turn, and the model reads what is left: the effect of a word is by how many nats
the log-probability of the chosen token falls without it. This is occlusion (Li, Monroe and Jurafsky 2016, arXiv
1612.08220): a measured change, not a decomposition, so effects do not add up, and of two words that say the same
neither may have one. The text after the prompt and special tokens stay.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from playground.decoding.stream import chunk_of
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from playground.errors import Refusal

MOST_WORDS = 48  # forwards beside the one of the whole text; words of a longer prompt are removed in groups
MOST_TOKENS = 24_576  # of all forwards together
FEWEST_GROUPS = 4


@dataclass
class WordEffect:
    """Words that were removed together, and the effect."""

    text: str
    first: int  # index of their first token
    effect: float  # nats that the chosen token loses without them


@dataclass
class Attribution:
    """Effects in the order of the prompt. `logprob` is that of the chosen token after the whole text, in nats."""

    logprob: float
    effects: list[WordEffect]
    forwards: int


def attribute(model: Model, tokens: list[int], prompt: int, chosen: int) -> Attribution:
    """The effects of the words among the first `prompt` of `tokens` on the token `chosen` after them.

    Raises Refusal for a model that does not continue text, tokens of another model, and a text that is too long.
    """
    _check(model, tokens, chosen)
    groups = _groups(_words(model, tokens[:prompt]), len(tokens))
    if not groups:
        raise Refusal("The prompt has no words that could be left out: write some.", "prompt")
    whole = _logprob(model, tokens, chosen)
    effects = []
    for group in groups:
        left_out = set(group)
        rest = [token for position, token in enumerate(tokens) if position not in left_out]
        effect = whole - _logprob(model, rest, chosen) if rest else 0.0
        effects.append(WordEffect("".join(model.tokens.pieces([tokens[i] for i in group])), group[0], round(effect, 4)))
    return Attribution(round(whole, 4), effects, len(groups) + 1)


def _check(model: Model, tokens: list[int], chosen: int) -> None:
    if getattr(model, "fills", False):
        raise Refusal(f"{model.name} fills masked positions and does not continue text: choose another model.", "model")
    if not 0 < len(tokens) <= min(model.context, MOST_TOKENS // FEWEST_GROUPS):
        raise Refusal(f"The text before this token has {len(tokens):,} tokens, too many for this: shorten it.")
    if not all(0 <= token < model.vocabulary for token in [*tokens, chosen]):
        raise Refusal(f"These are not tokens of {model.name}: run the prompt again with this model.", "model")


def _words(model: Model, tokens: list[int]) -> list[list[int]]:
    """Positions of the tokens of each word: a word begins with a space or a line, or after a special token."""
    words: list[list[int]] = []
    begins = True
    for position, token in enumerate(tokens):
        if model.tokens.is_special(token):
            begins = True
            continue
        if begins or model.tokens.piece(token)[:1].isspace():
            words.append([])
        words[-1].append(position)
        begins = False
    return words


def _groups(words: list[list[int]], length: int) -> list[list[int]]:
    """The words, joined to as many groups of neighbours as the limits allow for a text of `length` tokens."""
    most = max(FEWEST_GROUPS, min(MOST_WORDS, MOST_TOKENS // length - 1))
    size = -(-len(words) // most)
    return [sum(words[at:at + size], []) for at in range(0, len(words), size)] if words else []


def _logprob(model: Model, tokens: list[int], chosen: int) -> float:
    """Log-probability of `chosen` after `tokens`, in nats; no cache is retained."""
    store, chunk = model.new_store(), chunk_of(model)
    logits: list[torch.Tensor] = []
    for start in range(0, len(tokens), chunk):
        piece = tokens[start:start + chunk]
        logits, _ = model.forward([ForwardInput(store, piece, list(range(-1, len(piece) - 1)), last_only=True)])
        store.commit(len(piece) - 1)
    return float(logits[0][-1].float().log_softmax(-1)[chosen])
