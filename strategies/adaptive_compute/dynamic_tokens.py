"""Dynamic tokenization: frequent neighbours in the prompt become one input each."""
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from playground.algorithms.sampling.plain_decoding import plain
from playground.contract import Decoder, Lane, knob
from playground.events import Figure, Note

BOUNDARIES = ("pre-token", "word", "sentence")
SHOWN = 12  # merged pieces in the figure
SENTENCE_ENDS = (".", "!", "?", "\n")


class PromptPiece(NamedTuple):
    """Tokens that the model reads as one input. fixed: it is never merged."""

    tokens: tuple[int, ...]
    bytes: bytes
    fixed: bool


class DynamicTokens(Decoder):
    """Merge frequent neighbours of the prompt into one input each, whose embedding is the mean of their tokens'.

    As in byte-pair encoding, but anew for each prompt: of all pairs of neighbouring pieces that occur at least twice
    the most frequent is merged wherever it occurs, up to `merges` times. A merged piece stays within a `boundary`: one
    run of letters, digits, punctuation or spaces with a space before it, one word, or one sentence. Special tokens, and
    `kept` tokens at the end, stay as they are, and so does the text that is written. The prompt then takes fewer
    positions and slots of the KV cache. The authors compute embeddings with a hypernetwork, which is left out here, and
    so are their larger vocabularies for writing; the mean is their baseline. Names and numbers suffer first. With no
    merges this is plain decoding. Feher et al. 2024, arXiv 2411.18553.
    """

    name, title, paper = "dynamic_tokens", "Merged prompt tokens", "2411.18553"
    sheet = "weights/dynamic-tokenization"
    guarantee, refuses = ("collapses",), ("cache_policy", "compute_policy")
    replaces_prompt, sure = True, "medium"

    merges: int = knob(10, 0, 100, step=1, help="pairs of pieces that are merged; 0 is plain decoding")
    boundary: str = knob("word", choices=BOUNDARIES, help="what a merged piece does not reach beyond")
    kept: int = knob(4, 1, 64, step=1, help="tokens at the end of the prompt that stay as they are")

    def decode(self, lm: Lane) -> Iterator:
        prompt = lm.tokens[:lm.prompt_length]
        free = len(prompt) - self.kept
        pieces = [PromptPiece((token,), lm.bytes(token), at >= free or lm.special(token))
                  for at, token in enumerate(prompt)]
        merged, done = merge(pieces, self.merges, self.boundary)
        if done:
            lm.replace_prompt([embedded(lm, piece) for piece in merged])
            yield from shown_pieces(lm, merged)
            yield Note(f"{done} pairs merged: {len(merged)} positions instead of {len(prompt)}.")
        elif self.merges:
            yield Note("No pair of neighbours occurs twice within the boundary: the prompt is read as it is.")
        yield from plain(lm)


def merge(pieces: Sequence[PromptPiece], most: int, boundary: str) -> tuple[list[PromptPiece], int]:
    """The pieces after at most so many merges, and how many there were."""
    found = list(pieces)
    for done in range(most):
        pairs = Counter((left.tokens, right.tokens) for left, right in pairwise(found)
                        if mergeable(left, right, boundary))
        best = max(pairs, key=pairs.__getitem__, default=None)  # of equally frequent pairs the first
        if best is None or pairs[best] < 2:
            return found, done
        found = merged_everywhere(found, best)
    return found, most


def merged_everywhere(
    pieces: Sequence[PromptPiece], pair: tuple[tuple[int, ...], tuple[int, ...]]
) -> list[PromptPiece]:
    """The pieces after all occurrences of a pair became one, from left to right."""
    found: list[PromptPiece] = []
    fresh = False  # whether the last piece has just been merged
    for piece in pieces:
        last = found[-1] if found and not fresh else None
        fresh = last is not None and (last.tokens, piece.tokens) == pair and not (last.fixed or piece.fixed)
        if fresh:
            last = found.pop()
            piece = PromptPiece(last.tokens + piece.tokens, last.bytes + piece.bytes, False)
        found.append(piece)
    return found


def mergeable(left: PromptPiece, right: PromptPiece, boundary: str) -> bool:
    """Whether two neighbouring pieces may become one."""
    if left.fixed or right.fixed:
        return False
    before, text = (part.decode(errors="surrogateescape") for part in (left.bytes, left.bytes + right.bytes))
    if boundary == "sentence":
        return not before.endswith(SENTENCE_ENDS) and "\n" not in text
    inner = text.removeprefix(" ")
    if not inner.strip(" "):
        return True  # a run of spaces
    if any(character.isspace() for character in inner):
        return False
    return boundary == "word" or len({_class(character) for character in inner}) == 1


def _class(character: str) -> str:
    """Bytes that are no character by themselves count as letters."""
    if character.isalpha() or "\udc80" <= character <= "\udcff":
        return "letter"
    return "digit" if character.isnumeric() else "other"


def embedded(lm: Lane, piece: PromptPiece) -> int | Tensor:
    """What the model reads for a piece: its token, or the mean embedding of its tokens."""
    if len(piece.tokens) == 1:
        return piece.tokens[0]
    return lm.embed(list(piece.tokens)).mean(0)


def shown_pieces(lm: Lane, pieces: Sequence[PromptPiece]) -> Iterator[Figure]:
    """The merged pieces that occur most often, and the length of the prompt."""
    counts = Counter(piece.tokens for piece in pieces if len(piece.tokens) > 1).most_common(SHOWN)
    labels = [lm.text_of(list(tokens)) for tokens, _ in counts]
    yield Figure("bars", "merged pieces, by how often they occur",
                 {"labels": labels, "values": [count for _, count in counts]})
    yield Figure("bars", "length of the prompt", {"labels": ["tokens of the prompt", "positions read"],
                                                  "values": [lm.prompt_length, len(pieces)]})
