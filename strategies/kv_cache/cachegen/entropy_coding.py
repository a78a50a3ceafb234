"""Entropy coding of many streams of symbols, each with its own table, by range asymmetric numeral systems (rANS).

The state of a stream is an integer x that grows by log2(total / width) bits for a symbol with `width` of `total` in its
table. Overflow is written 16 bits at a time. Encoding starts at the last symbol, so that decoding runs forwards. All
streams advance together. Sizes are those of arithmetic coding plus at most 32 bits per stream. Duda 2013, arXiv
1311.2540.
"""
from __future__ import annotations

import numpy
from numpy.typing import NDArray

BITS = 16  # per word, and of a table's total
TOTAL, LOWEST = 1 << BITS, 1 << BITS  # between two symbols LOWEST <= x < LOWEST << BITS

Symbols = NDArray[numpy.int64]


def tables(symbols: Symbols, kinds: int) -> Symbols:
    """Cumulative frequency tables [streams, kinds + 1] of symbols [n, streams]; the last entry is the total.

    Every symbol has a positive width, even if it never occurs.
    """
    counts = numpy.stack([numpy.bincount(stream, minlength=kinds) for stream in symbols.T])
    ends = counts.cumsum(1) * (TOTAL - kinds) // max(1, len(symbols)) + numpy.arange(1, kinds + 1)
    ends[:, -1] = TOTAL
    return numpy.concatenate([numpy.zeros((len(ends), 1), numpy.int64), ends], 1)


def encode(symbols: Symbols, starts: Symbols) -> tuple[Symbols, Symbols, Symbols]:
    """Encode symbols [n, streams] with tables [streams, kinds + 1].

    Returns the final state of each stream [streams], its number of words [streams], and all words, stream by stream.
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
    """Inverse of `encode`: the symbols [n, streams]."""
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
