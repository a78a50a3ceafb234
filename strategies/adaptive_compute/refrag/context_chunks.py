"""The chunks of a context: where they are in the prompt, what the target reads instead, and their cached vectors."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate

from torch import Tensor

from playground.errors import Refusal

MOST = 4096  # chunk vectors that are remembered
Contents = tuple[int, ...]
"""The tokens of a chunk"""


class ChunkVectors:
    """Vectors by the tokens of their chunk, of which the newest are kept."""

    def __init__(self) -> None:
        self._vectors: dict[Contents, Tensor] = {}

    def known(self) -> Mapping[Contents, Tensor]:
        return self._vectors

    def add(self, fresh: Mapping[Contents, Tensor]) -> None:
        self._vectors |= fresh
        for oldest in list(self._vectors)[:-MOST]:
            del self._vectors[oldest]

    def digest(self) -> str:
        return blake2b(repr(list(self._vectors)).encode(), digest_size=8).hexdigest()


def chunks_of(pieces: Sequence[bytes], context: str, question: str, size: int) -> list[range]:
    """Positions in the prompt of the complete chunks of `size` tokens of its context.

    `pieces` are the bytes of the prompt's tokens. Blank lines separate passages, and no chunk contains tokens of two.
    Raises Refusal if the context is not found.
    """
    found, chunks = context_start(b"".join(pieces), context.encode(), question.encode()), []
    if found < 0:
        raise Refusal(
            "The tokens of the prompt do not spell the context as it was entered: remove names of special tokens and "
            "decomposed characters from it.",
            "context",
        )
    ends = list(accumulate(map(len, pieces)))
    for start, end in paragraphs(context.encode()):
        inside = [position for position, piece in enumerate(pieces)
                  if piece and found + start <= ends[position] - len(piece) and ends[position] <= found + end]
        chunks += [range(*(inside[first], inside[first] + size)) for first in range(0, len(inside) - size + 1, size)]
    return chunks


def context_start(text: bytes, context: bytes, question: bytes) -> int:
    """Where the context begins in the text of a prompt, preferably not inside the question; -1 if nowhere."""
    asked = text.rfind(question) if question else -1
    if asked >= 0:
        outside = text[:asked] + bytes(len(question)) + text[asked + len(question):]
        if (found := outside.rfind(context)) >= 0:
            return found
    return text.rfind(context)


def paragraphs(text: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each passage: the lines between two blank ones, without a line end after the last."""
    start = at = 0
    for line in [*text.splitlines(keepends=True), b""]:
        if not line.strip():
            if at > start:
                yield start, start + len(text[start:at].rstrip())
            start = at + len(line)
        at += len(line)


def shortened(
    prompt: Sequence[int], chunks: Sequence[range], vectors: Sequence[Tensor], expanded: Collection[int]
) -> list[int | Tensor]:
    """What the target reads: the tokens of the prompt, with one vector in place of each chunk that is not expanded."""
    compressed = {chunk.start: number for number, chunk in enumerate(chunks) if number not in expanded}
    inputs, at = [], 0
    while at < len(prompt):
        number = compressed.get(at)
        inputs.append(prompt[at] if number is None else vectors[number])
        at = at + 1 if number is None else chunks[number].stop
    return inputs
