"""A static draft tree chosen from measured accuracies: the paths that are most often accepted.

How often the token of rank r of head k is the right one is measured on held-out texts of the target. The probability
that a path is accepted is estimated as the product along it. Cai et al. 2024, arXiv 2401.10774.
"""
from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from playground.contract.token_tree import ROOT, TokenTree

Path = tuple[int, ...]
"""The rank of the draft token in each head, 0 for the most probable."""


def best_paths(accuracy: list[list[float]], nodes: int) -> list[Path]:
    """The `nodes` paths with the largest product of `accuracy`, [heads][ranks], parents before their children.

    A path's first child and next sibling are never more probable than itself if ranks are sorted, so a heap finds them
    in order; ranks that are not sorted are taken as if the earlier one had the larger share.
    """
    shares = [sorted(ranks, reverse=True) for ranks in accuracy]
    waiting: list[tuple[float, Path]] = [(-shares[0][0], (0,))] if shares and shares[0] else []
    chosen: list[Path] = []
    while waiting and len(chosen) < nodes:
        product, path = heappop(waiting)
        if product == 0:
            break
        chosen.append(path)
        depth, rank = len(path), path[-1]
        if depth < len(shares):
            heappush(waiting, (product * shares[depth][0], (*path, 0)))
        if rank + 1 < len(shares[depth - 1]):
            sibling = product / shares[depth - 1][rank] * shares[depth - 1][rank + 1]
            heappush(waiting, (sibling, (*path[:-1], rank + 1)))
    return sorted(chosen, key=lambda path: (len(path), path))


def rank_tree(
    name: str, shares: list[list[float]], tokens: list[list[int]], paths: list[Path], ends: Callable[[int], bool]
) -> tuple[TokenTree, dict[Path, int]]:
    """The tree of these paths of ranks, and the node of each path, of draft tokens by depth and rank with their shares.

    End tokens get no children, and are not listed among the nodes.
    """
    tree, nodes = TokenTree(name), {(): ROOT}
    for path in paths:
        depth, rank = len(path) - 1, path[-1]
        if path[:-1] not in nodes or rank >= len(tokens[depth]):
            continue
        token = tokens[depth][rank]
        node = tree.add(token, nodes[path[:-1]], confidence=shares[depth][rank])
        if not ends(token):
            nodes[path] = node
    return tree, nodes
