"""A static draft tree over candidate ranks, for drafters that know the order of candidates but not their probabilities.

The tree of Luo et al. 2024, arXiv 2408.08696; smaller trees are subtrees of it.
"""
from __future__ import annotations

from functools import cache

CHILDREN = """
    :8 0:8 1:4 2:3 3:2 4:1 5:1 6:1 7:1
    00:8 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 11:1 20:1 30:1 40:1 50:1
    000:5 001:2 002:1 003:1 004:1 010:1 020:1 100:1 200:1 300:1
    0000:3 0001:1 0002:1 0010:1 0100:1 1000:1
    00000:2 00010:1
"""  # path:number of children; a path lists the rank of each draft token on it, 0 for the best


@cache
def template(nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` of the 80 paths with the lowest sum of ranks, level by level. Every prefix of a path is included."""
    counts = (entry.split(":") for entry in CHILDREN.split())
    paths = [(*map(int, path), rank) for path, count in counts for rank in range(int(count))]
    chosen = sorted(paths, key=lambda path: sum(path) + len(path))[:nodes]
    return sorted(chosen, key=lambda path: (len(path), path))
