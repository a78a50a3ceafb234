"""A tree of ranks: which guesses are worth their place where all that is known of them is that one seems likelier than
another.

The tree of Luo et al. 2024, arXiv 2408.08696; smaller ones are cut out of it.
"""
from __future__ import annotations

from functools import cache

CHILDREN = """
    :8 0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1
    00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 50:1
    000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1
    0000:3 0001:1 0002:1 0010:1 0100:1 1000:1
    00000:2 00010:1
"""  # of each path of the tree; a path names the rank of every guess on it, best first


@cache
def template(nodes: int) -> list[tuple[int, ...]]:
    """That many paths of the 80, level by level: those whose ranks are best in sum, so every path's beginning is there.
    """
    counts = (entry.split(":") for entry in CHILDREN.split())
    paths = [(*map(int, path), rank) for path, count in counts for rank in range(int(count))]
    chosen = sorted(paths, key=lambda path: sum(path) + len(path))[:nodes]
    return sorted(chosen, key=lambda path: (len(path), path))
