"""Drafting on a device without waiting: the host reads the tokens of all levels when the last one is drafted.

It can be done where nothing on the host has to know a draft token before the next one is drafted. What follows an end
token is removed afterwards. Random numbers are keyed by the numbers of nodes: if such a removal changed those of a tree
that branches, it is drafted once more, level by level.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from playground.contract.token_tree import ROOT, UNREAD, TokenTree
from playground.engine.host_copies import read_lists
from playground.engine.sampling import largest

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract import Lane
    from playground.decoding.rows import Rows
    from playground.decoding.stream import Exit, Stream


class DraftedLevel(NamedTuple):
    """Tokens on the device after the leaves of a level, [leaves, width], and their probabilities."""

    tokens: Tensor
    chances: Tensor
    keys: list[tuple[str, int]]  # of the random numbers they were drawn with


def may_stay_unread(lm: Lane, stream: Stream | Exit) -> bool:
    """Whether a level can be drafted before the host has read the tokens of the last one."""
    return stream.takes_unread and not lm.chain.reads_text


def grow_unread(lm: Lane, stream: Stream, tree: TokenTree, widths: list[int]) -> Iterator:
    """As `grow_independent`, with one transfer for all levels; None if nodes would have other random numbers."""
    leaves, levels = [ROOT], []
    for width in widths:
        rows = yield stream.extend(tree)
        q = rows.scores_of(leaves).softmax(-1)
        levels.append(_drafted(lm, rows, leaves, q, min(width, q.shape[1])))
        drawn = [row if lm.chain.draws else None for row in q]
        leaves = [tree.add(UNREAD, leaf, own, 0.0)
                  for leaf, own in zip(leaves, drawn) for _ in range(levels[-1].tokens.shape[1])]
        tree.unread = levels[-1].tokens.flatten()
    return _read(lm, stream, tree, levels)


def _drafted(lm: Lane, rows: Rows, leaves: list[int], q: Tensor, width: int) -> DraftedLevel:
    """Tokens after leaves, from distributions q [leaves, V]: sampled, or the most probable ones."""
    if not lm.chain.draws:
        chances, tokens = largest(q, width)
        return DraftedLevel(tokens, chances, [])
    keys = [[(purpose(leaf, i), rows.position(leaf)) for i in range(width)] for leaf in leaves]
    tokens = lm.draw_unread(q, keys)
    return DraftedLevel(tokens, q.gather(1, tokens), [key for row in keys for key in row])


def _read(lm: Lane, stream: Stream, tree: TokenTree, levels: list[DraftedLevel]) -> TokenTree | None:
    """The tree with its tokens, without what is drafted after an end token and what cannot be drawn.

    None, with no random number used, if that changes the numbers of nodes that were drawn.
    """
    tree.unread = None
    if not levels:
        return tree
    tree.tokens[:], tree.confidences[:] = read_lists(torch.cat([level.tokens.flatten() for level in levels]),
                                                     torch.cat([level.chances.flatten() for level in levels]))
    nodes = _kept(lm, tree)
    if len(nodes) == len(tree):
        return tree
    keys = [key for level in levels for key in level.keys]
    if keys and nodes != list(range(len(nodes))):
        lm.undraw(keys)
        return None
    lm.undraw(keys[len(nodes):])
    shorter = tree.only(nodes)
    stream.prune(tree, nodes, shorter)
    return shorter


def _kept(lm: Lane, tree: TokenTree) -> list[int]:
    """Nodes that follow no end token, and have some probability, as those before them."""
    kept = {ROOT}
    for node, parent in enumerate(tree.parents):
        after_end = parent != ROOT and tree.tokens[parent] in lm.end_ids
        if parent in kept and not after_end and tree.confidences[node] > 0:
            kept.add(node)
    return sorted(kept - {ROOT})


def purpose(leaf: int, child: int) -> str:
    """The key under which a draft token is sampled. Drafters that share it sample alike in equal trees."""
    return f"draft/{leaf}/{child}"
