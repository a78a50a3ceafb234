"""A byte-level tokenizer of any size, made of letters: every token of several characters merges two shorter ones."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"


def made_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `vocabulary` tokens: the bytes, then letters in groups of two, three and four, then the end token.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(_merges(), vocabulary - len(letters) - 1))
    pieces = [*letters, *("".join(merge) for merge in merges)]
    backend = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs of tokens to merge: two letters, or a merged token and a letter."""
    shorter = ["Ġ", *ascii_lowercase]  # the byte-level alphabet's space, then letters
    while True:
        longer = [(piece, letter) for piece in shorter for letter in ascii_lowercase]
        yield from longer
        shorter = ["".join(pair) for pair in longer]
