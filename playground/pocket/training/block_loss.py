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
from torch import Tensor

from playground.engine.host_copies import moved
from playground.pocket.training.masked_loss import MASK
from playground.pocket.training.precision import mixed_precision
from playground.pocket.training.train import CrossEntropy

BLOCKS = (1, 4, 8, 8, 16)       # block lengths, one drawn for each step
COPIES = (1, 2)                 # numbers of the noised copies; 0 is the clean text
ROUND = 64                      # rows are padded to multiples of this


@dataclass(frozen=True)
class Streams:
    """Clean texts and noised copies of a batch, all arrays or tensors (rows, entries).

    at: position in the window that an entry reads; copy: 0 for clean; document: number of the text, 0 for none;
    block: number of the block within its text; hidden: masked. counted, (3, predictions): row, entry and predicted
    position in the window of every prediction that counts.
    """
    at: np.ndarray | Tensor
    copy: np.ndarray | Tensor
    document: np.ndarray | Tensor
    block: np.ndarray | Tensor
    hidden: np.ndarray | Tensor
    counted: np.ndarray | Tensor

    def on(self, device):
        """The same as tensors on a device, which is not waited for."""
        return Streams(*(moved(torch.from_numpy(array), device) for array in vars(self).values()))

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
    streams = draw(batch.windows.documents, batch.windows.weights > 0, rng.choice(BLOCKS), rng).on(batch.ids.device)
    rows, entries, predicted = streams.counted
    read = batch.ids.gather(1, streams.at).masked_fill(streams.hidden, MASK)
    with mixed_precision(read.device):
        states = model.model(read, attention_mask=streams.allowed, position_ids=streams.at).last_hidden_state
        logits = model.lm_head(states[rows, entries])
    weights = torch.full((len(rows),), 1 / len(rows), device=logits.device)
    return CrossEntropy.apply(logits, batch.ids[rows, predicted], weights)


def draw(documents, canvas, length, rng):
    """Draw `Streams` with blocks of `length`. documents: (rows, tokens), number of each text, 0 for none; canvas:
    (rows, tokens), bool, the answers.
    """
    index, answers = _index_in_text(documents), canvas & (documents > 0)
    block, offset = np.where(documents > 0, index // length, 0), index % length
    hidden, present = _noised(answers, offset == 0, np.random.default_rng(rng.getrandbits(64)))
    kept = _joined(np.ones_like(answers), *(present & (length > 1)))
    counted = _joined(answers & (offset == 0) & (index > 0), *(hidden & (offset > 0)))
    return _laid_out((documents, block), kept, _joined(np.zeros_like(answers), *hidden), counted & kept)


def _index_in_text(documents):
    """The index of each token in its text: (rows, tokens)."""
    at = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.diff(documents.astype(int), axis=1, prepend=-1) != 0
    return at - np.maximum.accumulate(np.where(begins, at, 0), 1)


def _noised(answers, starts, numbers):
    """What is masked in each copy, and the blocks that a copy has since it masks something: bool (2, rows, tokens).

    Of the tokens of a block that are answers, a random number is masked in one copy, and the others in the other.
    starts: the first tokens of the blocks.
    """
    block = starts.ravel().cumsum() - 1
    many = np.bincount(block, answers.ravel())
    chosen = 1 + (numbers.random(len(many)) * many).astype(int)
    shuffled = np.lexsort((numbers.random(len(block)), ~answers.ravel(), block))     # block by block, answers first
    place = np.empty_like(block)
    place[shuffled] = np.arange(len(block)) - np.flatnonzero(starts)[block]
    one = answers.ravel() & (place < chosen[block])
    hidden = np.stack([one, answers.ravel() & ~one])
    present = np.stack([np.bincount(block, masked)[block] > 0 for masked in hidden])
    return hidden.reshape(2, *answers.shape), present.reshape(2, *answers.shape)


def _joined(clean, *copies):
    """The clean text and its copies, one after the other: (rows, 3 * tokens)."""
    return np.concatenate([clean, *copies], 1)


def _laid_out(texts, kept, hidden, counted):
    """`Streams` of the kept entries. texts: text and block of each token, both (rows, tokens)."""
    entry, width = kept.cumsum(1) - 1, texts[0].shape[1]
    row, place = np.nonzero(kept)
    copy, at = np.divmod(place, width)
    padded = np.zeros((5, len(kept), -(-(entry.max() + 1) // ROUND) * ROUND), np.int64)
    padded[:, row, entry[row, place]] = at, copy, *(part[row, at] for part in texts), hidden[row, place]
    rows, predicted = np.nonzero(counted)
    from_entries = np.stack([rows, entry[rows, predicted] - 1, predicted % width])
    return Streams(*padded[:4], padded[4].astype(bool), from_entries)
