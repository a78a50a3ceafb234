"""The loss of a masked denoiser, and the masks that it is trained on.

A text of L tokens is masked at l of them, l uniform in 1 to L, and the loss is L / l times the cross-entropy of the
masked tokens: an upper bound of the negative log-likelihood, with less variance than masking every token with
probability t and weighting by 1 / t. Usually only the canvas is masked and the question stays visible. A share of the
texts is masked as a decoder meets them that works block by block: the canvas is visible before a block and masked after
it; what is after the block counts little, since a decoder does not fill it yet. A small share is masked as a whole,
question included; guidance needs it.

The network predicts a token from the position before it, as the autoregressive model does from which its weights come.
LLaDA: Nie et al. 2025, arXiv 2502.09992; shifted predictions: Dream, Ye et al. 2025, arXiv 2508.15487.
"""
from dataclasses import dataclass

import numpy as np
import torch

from playground.engine.host_copies import moved
from playground.pocket import tokenizer as tokens
from playground.pocket.training.precision import mixed_precision
from playground.pocket.training.train import CrossEntropy

MASK = tokens.SPECIALS.index(tokens.MASK)
WHOLE, BLOCKWISE = 0.03, 0.6        # shares of the texts masked as a whole, and as a block of a canvas
BLOCKS = (8, 16, 16, 32)            # block lengths of those
LATER = 0.2                         # weight of a masked token after the block


@dataclass(frozen=True)
class Masks:
    """What of a batch is masked. hidden: (rows, tokens), bool; weights: (rows, tokens), float, 0 where nothing counts.

    length: number of tokens whose negative log-likelihood the weighted cross-entropies bound, those after a block by
    their weight.
    """
    hidden: np.ndarray
    weights: np.ndarray
    length: float


def masked_loss(model, batch, trainer):
    """Bound of the negative log-likelihood per token, in nats, on masks that depend only on seed and step."""
    device = batch.ids.device
    drawn = draw(batch.windows.documents, batch.windows.weights > 0, trainer.rng())
    scored = np.flatnonzero(drawn.weights)      # on the host, which else would wait to learn how many there are
    hidden, places, weights = (
        moved(torch.from_numpy(array), device) for array in (drawn.hidden, scored, drawn.weights.ravel()[scored])
    )
    with mixed_precision(device):
        states = model.model(
            batch.ids.masked_fill(hidden, MASK), attention_mask=within_texts(batch.documents)
        ).last_hidden_state
        # of the positions before the scored ones only: the vocabulary is a third of the cost of a step
        logits = model.lm_head(states.flatten(0, 1)[places - 1])
    return CrossEntropy.apply(logits, batch.ids.flatten()[places], weights / max(1, drawn.length))


def within_texts(documents):
    """Mask of full attention within a text, and none between texts: (rows, 1, tokens, tokens), bool."""
    return (documents[:, :, None] == documents[:, None, :])[:, None]


def draw(documents, canvas, rng):
    """Draw `Masks`. documents: (rows, tokens), number of each text, 0 for none; canvas: (rows, tokens), bool."""
    hidden, weights, length = np.zeros(documents.shape, bool), np.zeros(documents.shape, np.float32), 0
    for row, numbers in enumerate(documents):
        for number in range(1, numbers.max() + 1):
            places = np.flatnonzero(numbers == number)
            later, counted = _of_text(places, places[canvas[row, places]], rng)
            chosen = rng.sample(counted, rng.randint(1, len(counted)))
            hidden[row, [*chosen, *later]] = True
            weights[row, later], weights[row, chosen] = LATER, len(counted) / len(chosen)
            length += len(counted) + LATER * len(later)
    return Masks(hidden, weights, length)


def _of_text(places, canvas, rng):
    """Positions of a text that are all masked and count little, and those of which some are masked and count."""
    drawn = rng.random()
    if drawn < WHOLE:
        return [], places[1:].tolist()      # nothing predicts the first token
    if drawn > WHOLE + BLOCKWISE:
        return [], canvas.tolist()
    length = rng.choice(BLOCKS)
    start = length * rng.randrange(-(-len(canvas) // length))
    return canvas[start + length:].tolist(), canvas[start:start + length].tolist()
