"""The loss of a block-diffusion model: clean texts, and noised copies of their answers, in one forward.

Positions are counted in blocks from the start of a text. A block of a noised copy sees itself and the clean blocks
before it; a clean block sees itself and the clean blocks before it, as it is read when it is finished. Two copies have
complementary masks, so that every token of an answer counts once. A token is predicted from the position before it,
the first of a block from the clean block before. With blocks of one position this is the next-token loss of the clean
text, so that one network learns several block lengths, autoregressive decoding among them.

Block diffusion: Arriola et al. 2025, arXiv 2503.09573; complementary masks and shifted predictions: Fast-dLLM v2, Wu et
al. 2025, arXiv 2509.26328.
"""
from dataclasses import dataclass

import numpy as np
import torch

from playground.pocket.training.masked_loss import MASK
from playground.pocket.training.precision import mixed_precision
from playground.pocket.training.train import CrossEntropy

BLOCKS = (1, 4, 8, 8, 16)       # block lengths, one drawn for each step
COPIES = (1, 2)                 # numbers of the noised copies; 0 is the clean text
ROUND = 64                      # rows are padded to multiples of this


@dataclass(frozen=True)
class Streams:
    """Clean texts and noised copies of a batch, all arrays (rows, entries).

    at: position in the window that an entry reads; copy: 0 for clean; document: number of the text, 0 for none;
    block: number of the block within its text; hidden: masked. counted: (row, entry, predicted position in the window)
    of every prediction that counts.
    """
    at: np.ndarray
    copy: np.ndarray
    document: np.ndarray
    block: np.ndarray
    hidden: np.ndarray
    counted: list

    @property
    def allowed(self):
        """Which entries see which, bool (rows, 1, entries, entries)."""
        def pair(array):
            return array[:, :, None], array[:, None, :]
        (text, other), (copy, theirs), (block, before) = map(pair, (self.document, self.copy, self.block))
        own, earlier = (copy == theirs) & (block == before), (theirs == 0) & (before < block)
        return ((text == other) & (own | earlier))[:, None]


def block_loss(model, batch, trainer):
    """Mean negative log-likelihood of the tokens of the answers, in nats, under masks that depend on seed and step."""
    rng = trainer.rng()
    streams = draw(batch.documents.numpy(force=True), batch.weights.numpy(force=True) > 0, rng.choice(BLOCKS), rng)
    at, hidden, allowed = (
        torch.from_numpy(array).to(batch.ids.device) for array in (streams.at, streams.hidden, streams.allowed)
    )
    rows, entries, predicted = (torch.tensor(part, device=batch.ids.device) for part in zip(*streams.counted))
    with mixed_precision(batch.ids.device):
        states = model.model(
            batch.ids.gather(1, at).masked_fill(hidden, MASK), attention_mask=allowed, position_ids=at
        ).last_hidden_state
        logits = model.lm_head(states[rows, entries])
    weights = torch.full((len(rows),), 1 / len(rows), device=logits.device)
    return CrossEntropy.apply(logits, batch.ids[rows, predicted], weights)


def draw(documents, canvas, length, rng):
    """Draw `Streams` with blocks of `length`. documents: (rows, tokens), number of each text, 0 for none; canvas:
    (rows, tokens), bool, the answers.
    """
    rows = [_row(numbers, answers, length, rng) for numbers, answers in zip(documents, canvas)]
    size = -(-max(len(entries) for entries, _ in rows) // ROUND) * ROUND
    padded = np.zeros((len(rows), size, 5), np.int64)
    for row, (entries, _) in enumerate(rows):
        padded[row, :len(entries)] = entries
    counted = [(row, entry, token) for row, (_, found) in enumerate(rows) for entry, token in found]
    at, copy, document, block, hidden = np.moveaxis(padded, 2, 0)
    return Streams(at, copy, document, block, hidden.astype(bool), counted)


def _row(numbers, answers, length, rng):
    """Entries (at, copy, document, block, hidden) of one window, and (entry, predicted position) of what counts."""
    entries = [(at, 0, number, 0, False) for at, number in enumerate(numbers)]
    counted = []
    for number in range(1, numbers.max() + 1):
        places = np.flatnonzero(numbers == number)
        for block, start in enumerate(range(0, len(places), length)):
            inside = places[start:start + length].tolist()
            for at in inside:
                entries[at] = (at, 0, number, block, False)
            wanted = [at for at in inside if answers[at]]
            if wanted and start:
                counted += [(inside[0] - 1, inside[0])] * bool(answers[inside[0]])
            if wanted and length > 1:
                _noise(inside, wanted, (number, block), (entries, counted), rng)
    return entries, counted


def _noise(inside, wanted, place, written, rng):
    """Append the noised copies of a block of positions `inside`, of which `wanted` may be masked, to `written`."""
    (number, block), (entries, counted) = place, written
    chosen = set(rng.sample(wanted, rng.randint(1, len(wanted))))
    for copy, masked in zip(COPIES, (chosen, set(wanted) - chosen)):
        if masked:
            first = len(entries)
            entries += [(at, copy, number, block, at in masked) for at in inside]
            counted += [(first + offset - 1, at) for offset, at in enumerate(inside) if offset and at in masked]
