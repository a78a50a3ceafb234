"""Many streams of symbols in as few bits as their statistics allow, each with a table of its own: asymmetric numeral
systems.

A stream is one whole number x that grows by log2(total / width) bits for a symbol whose table gives it `width` of
`total`. What no longer fits is written out 16 bits at a time, last symbol first, so that reading goes forwards. All
streams take each step together. Sizes are those of arithmetic coding, but for at most 32 bits a stream. Duda 2013,
arXiv 1311.2540.
"""
from __future__ import annotations

import numpy
from numpy.typing import NDArray

BITS = 16  # of a word, and of the total of a table
TOTAL, LOWEST = 1 << BITS, 1 << BITS  # x stays within LOWEST and LOWEST << BITS between two symbols

Symbols = NDArray[numpy.int64]


def tables(symbols: Symbols, kinds: int) -> Symbols:
    """Where each of `kinds` symbols begins in the table of its stream, and the total, [streams, kinds + 1], made of
    symbols [n, streams].

    Every kind has some width, those that never occur too.
    """
    counts = numpy.stack([numpy.bincount(stream, minlength=kinds) for stream in symbols.T])
    ends = counts.cumsum(1) * (TOTAL - kinds) // max(1, len(symbols)) + numpy.arange(1, kinds + 1)
    ends[:, -1] = TOTAL
    return numpy.concatenate([numpy.zeros((len(ends), 1), numpy.int64), ends], 1)


def encode(symbols: Symbols, starts: Symbols) -> tuple[Symbols, Symbols, Symbols]:
    """Symbols [n, streams] by tables [streams, kinds + 1]: the last x of each stream, how many words each has, and all
    words, stream after stream.
    """
    streams = numpy.arange(symbols.shape[1])
    x, words, full = numpy.full(len(streams), LOWEST), numpy.zeros_like(symbols), numpy.zeros(symbols.shape, bool)
    for at in reversed(range(len(symbols))):
        start = starts[streams, symbols[at]]
        width = starts[streams, symbols[at] + 1] - start
        full[at] = x >= width << BITS
        words[at] = x & (TOTAL - 1)
        x = numpy.where(full[at], x >> BITS, x)
        x = (x // width << BITS) + x % width + start
    return x, full.sum(0), words.T[full.T]


def decode(x: Symbols, counts: Symbols, words: Symbols, starts: Symbols, n: int) -> Symbols:
    """The symbols [n, streams] that `encode` was given."""
    streams, at = numpy.arange(len(x)), counts.cumsum() - counts
    found, words = numpy.empty((n, len(x)), numpy.int64), numpy.append(words, 0)
    for row in found:
        place = x & (TOTAL - 1)
        row[:] = (starts[:, 1:] <= place[:, None]).sum(1)
        start = starts[streams, row]
        x = (starts[streams, row + 1] - start) * (x >> BITS) + place - start
        short = x < LOWEST
        x = numpy.where(short, x << BITS | words[numpy.minimum(at, len(words) - 1)], x)
        at = at + short
    return found
