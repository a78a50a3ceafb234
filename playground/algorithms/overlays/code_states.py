"""Programs that a model has read: the tokens of Python, their states and their trees; and trees without a network."""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from playground.algorithms.overlays.tree_probe import UNKNOWN, TreeExample
from playground.algorithms.programs.program_states import code_in
from playground.algorithms.programs.syntax_tree import EMPTY, ParsedCode, TreeSequences, parsed, sequences

PARTS = 10  # of all programs: one is tested, one chooses the layer


class CodeTokens(NamedTuple):
    """The first program of a text."""

    code: ParsedCode
    words: list[str]  # of its tokens
    pieces: list[tuple[int, int]]  # of the text, [from, to), that each token is spelt with
    part: int  # 0 to PARTS - 1; programs with one body are in one part

    def pooled(self, states: Tensor) -> Tensor:
        """The mean of the states [..., pieces, d] of each token's pieces, [..., n, d]."""
        return torch.stack([states[..., first:end, :].float().mean(-2) for first, end in self.pieces], -2)


class ReadProgram(NamedTuple):
    """A program with its states after every layer."""

    tokens: CodeTokens
    tree: TreeSequences
    states: Tensor  # [layers, n, d], in half precision

    def example(self, layer: int, labels: Sequence[str], unary: Sequence[str]) -> TreeExample:
        """What a probe of one layer is trained on."""
        numbers = {label: number for number, label in enumerate(labels)}
        unary_numbers = {label: number for number, label in enumerate(unary)}
        return TreeExample(
            self.states[layer].float(), torch.tensor(self.tree.distances, dtype=torch.float32),
            torch.tensor([numbers.get(label, UNKNOWN) for label in self.tree.labels], dtype=torch.long),
            torch.tensor([unary_numbers.get(label, UNKNOWN) for label in self.tree.unary], dtype=torch.long),
        )

    def shuffled(self, seed: int) -> ReadProgram:
        """The same states with the distances and labels of its tree in random order."""
        chance, tree = torch.Generator().manual_seed(seed), self.tree
        order, unary = (torch.randperm(len(each), generator=chance).tolist() for each in (tree.labels, tree.unary))
        return self._replace(tree=TreeSequences(
            [tree.distances[at] for at in order], [tree.labels[at] for at in order], [tree.unary[at] for at in unary],
        ))


def code_tokens(pieces: Sequence[str]) -> CodeTokens | None:
    """The first program of a text of these pieces, complete or cut off after a line."""
    found = code_in("".join(pieces))
    tree = parsed(found[1]) if found else None
    if found is None or tree is None:
        return None
    begin, code = found
    ends = list(accumulate(map(len, pieces)))
    spelt = [(bisect_right(ends, begin + first), bisect_left(ends, begin + end) + 1) for first, end in tree.spans]
    body = code.rsplit('"""', 1)[-1]
    return CodeTokens(tree, [code[first:end] for first, end in tree.spans], spelt, crc32(body.encode()) % PARTS)


def programs_in(texts) -> list[ReadProgram]:
    """The programs of texts, with two tokens or more, read by their model."""
    found = []
    for ids in texts.texts:
        tokens = code_tokens([texts.piece(token) for token in ids])
        if tokens is None or len(tokens.words) < 2:
            continue
        layers = texts.states(ids, range(texts.model.depth + 1))[1]
        states = torch.stack([tokens.pooled(layers[layer].cpu()) for layer in sorted(layers)])
        found.append(ReadProgram(tokens, sequences(tokens.code), states.half()))
    return found


class PairTable:
    """A tree without a network: the mean distance and the most frequent label after each pair of words."""

    def __init__(self, programs: Sequence[ReadProgram]):
        self._distances: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._labels: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._unary: dict[str, Counter[str]] = defaultdict(Counter)
        for tokens, tree, _ in programs:
            for pair, distance, label in zip(zip(tokens.words, tokens.words[1:]), tree.distances, tree.labels):
                self._distances[pair].append(distance)
                self._labels[pair][label] += 1
            for word, unary in zip(tokens.words, tree.unary):
                self._unary[word][unary] += 1

    def tree(self, words: Sequence[str]) -> TreeSequences:
        """The tree of words in the order of a program; what was never seen is low, and empty."""
        pairs = list(zip(words, words[1:]))
        means = [sum(self._distances[pair]) / len(self._distances[pair]) if pair in self._distances else 0.0
                 for pair in pairs]
        labels = [_most(self._labels, pair) for pair in pairs]
        return TreeSequences(means, labels, [_most(self._unary, word) for word in words])


def _most(counts: dict, key) -> str:
    return counts[key].most_common(1)[0][0] if key in counts else EMPTY
