"""Figures of a syntax tree that is read off a network, beside the true one."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from playground.algorithms.overlays.code_states import CodeTokens
from playground.algorithms.programs.syntax_tree import EMPTY, JOINT, Constituent, TreeSequences, sequences
from playground.events import Figure

NODES = 200  # of a tree that is drawn
WORDS = 40  # characters of a node's code
TOP = 3  # labels on the card of a token


def are_right(found: Sequence[Constituent], true: Sequence[Constituent]) -> list[bool]:
    """Whether each constituent is in the true tree, each true one once."""
    left, right = Counter(true), []
    for each in found:
        right.append(left[each] > 0)
        left[each] -= 1
    return right


def cards(tree: TreeSequences, scores: Tensor, labels: Sequence[str]) -> list[str]:
    """What is read at each word of a program, with the best labels of the break before it."""
    def best(row: Tensor) -> str:
        top = row.topk(min(TOP, len(labels)))
        return ", ".join(f"{plain(labels[at])} {score:.1f}" for at, score in zip(top.indices.tolist(), top.values))

    breaks = ["", *(f"distance {distance:.1f} to the word before, at {best(row)}"
                    for distance, row in zip(tree.distances, scores))]
    own = ["" if unary == EMPTY else plain(unary) for unary in tree.unary]
    return ["; ".join(filter(None, parts)) or "the first word" for parts in zip(own, breaks)]


def plain(label: str) -> str:
    """A label in words."""
    return label.replace(JOINT, " over ").replace(EMPTY, "no node")


def coloured(
    count: int, tokens: CodeTokens, found: Sequence[Constituent], right: Sequence[bool], words: Sequence[str]
) -> tuple[list[float], list[str]]:
    """For each of the text's pieces, the share of the constituents around its last word that are right, and words."""
    shares, labels = [torch.nan] * count, [""] * count
    for at, (first, end) in enumerate(tokens.pieces):
        around = [good for each, good in zip(found, right) if each.first <= at < each.end]
        shares[first:end] = [sum(around) / max(len(around), 1)] * (end - first)
        labels[first:end] = [words[at]] * (end - first)
    return shares, labels


def distances(count: int, tokens: CodeTokens, tree: TreeSequences) -> dict[str, list[float]]:
    """At the piece that completes each word, the distance that is read, and the height in the true tree."""
    series = {}
    for name, each in (("read", tree), ("height in the true tree", sequences(tokens.code))):
        series[name] = [torch.nan] * count
        for (_, end), distance in zip(tokens.pieces[1:], each.distances):
            series[name][end - 1] = float(distance)
    return series


def drawn_tree(tokens: CodeTokens, found: Sequence[Constituent], right: Sequence[bool]) -> Figure:
    """The constituents that are read, 1 where the true tree has them."""
    order = sorted(range(len(found)), key=lambda at: (found[at].first, -found[at].end))[:NODES]
    above: list[int] = []
    parents = []
    for number, at in enumerate(order):
        while above and found[order[above[-1]]].end < found[at].end:
            above.pop()
        parents.append(above[-1] if above else -1)
        above.append(number)
    labels = [f"{found[at].label}: {' '.join(tokens.words[found[at].first:found[at].end])}"[:WORDS] for at in order]
    values = [float(right[at]) for at in order]
    data = {"labels": labels, "parents": parents, "values": values}
    return Figure("tree", "syntax tree as read; 1: so in the program", data)
