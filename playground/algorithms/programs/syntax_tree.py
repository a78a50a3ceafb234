"""Syntax trees over the tokens of Python code, as sequences of distances and labels, and back.

A binary tree over n tokens is n - 1 distances, each the height of the lowest common ancestor of two neighbours, as many
labels of these ancestors, and n unary labels of the tokens. Hernandez Lopez et al. 2022, arXiv 2206.11719; the tree is
that of Python's `ast` and `tokenize` modules, where the paper takes tree-sitter's.
"""
from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

EMPTY, JOINT = "<empty>", "<sep>"  # the label of a node that only makes the tree binary; between labels of a chain
BAD_ROOT = "bad_root"  # in place of a root that would be empty
MOST_TOKENS = 300  # of code that is read
LEFT_OUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Constituent(NamedTuple):
    """A node of the tree, with the first token below it and the one after the last."""

    label: str
    first: int
    end: int


class TreeSequences(NamedTuple):
    """A tree of n tokens."""

    distances: list[float]  # n - 1
    labels: list[str]  # n - 1, of the inner nodes
    unary: list[str]  # n


class ParsedCode(NamedTuple):
    """Tokens of a program, as characters [from, to), and the constituents of its tree."""

    spans: list[tuple[int, int]]
    constituents: list[Constituent]


@dataclass
class Node:
    """A node over the tokens [first, end); without children it is a token."""

    label: str
    first: int
    end: int
    children: list[Node] = field(default_factory=list)


def parsed(code: str) -> ParsedCode | None:
    """The tokens and constituents of a program; None if it is no program, or has more than MOST_TOKENS tokens."""
    if "\r" in code:  # `ast` and `tokenize` differ in what a line is
        return None
    try:
        tree, tokens = ast.parse(code), list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return None
    places = _Places([f"{line}\n" for line in code.split("\n")])
    spans = [(places.begin(*token.start), places.begin(*token.end)) for token in tokens if token.type not in LEFT_OUT]
    return ParsedCode(spans, _constituents(tree, places, spans)) if 0 < len(spans) <= MOST_TOKENS else None


class _Places:
    """Where in a program a place of a line is."""

    def __init__(self, lines: list[str]):
        self._lines, self._begins = lines, [0, *accumulate(map(len, lines))]

    def begin(self, line: int, column: int) -> int:
        return self._begins[line - 1] + column

    def of(self, node: ast.AST) -> tuple[int, int] | None:
        """The characters of a node; None if it has no place."""
        if not isinstance(node, (ast.stmt, ast.expr, ast.arg, ast.keyword, ast.alias, ast.excepthandler, ast.pattern)):
            return None
        return self._of_byte(node.lineno, node.col_offset), self._of_byte(node.end_lineno, node.end_col_offset)

    def _of_byte(self, line: int | None, column: int | None) -> int:
        """`ast` counts bytes within a line."""
        assert line is not None
        return self.begin(line, len(self._lines[line - 1].encode()[:column].decode(errors="ignore")))


def _constituents(tree: ast.AST, places: _Places, spans: Sequence[tuple[int, int]]) -> list[Constituent]:
    """The nodes with tokens, each parent before its children. What is in an f-string is left to its tokens."""
    found: list[Constituent] = []

    def visit(node: ast.AST) -> tuple[int, int] | None:
        at = len(found)
        below = [] if isinstance(node, ast.JoinedStr) else ast.iter_child_nodes(node)
        parts = [*map(visit, below), _covered(places.of(node), spans)]
        known = [part for part in parts if part]
        if not known:
            return None
        whole = min(first for first, _ in known), max(end for _, end in known)
        found.insert(at, Constituent(type(node).__name__, *whole))
        return whole

    visit(tree)
    found[0] = Constituent(found[0].label, 0, len(spans))  # with an @ before, and a semicolon after, all statements
    return sorted(found, key=lambda each: (each.first, -each.end))  # stable: a parent of equal span stays before


def _covered(characters: tuple[int, int] | None, spans: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The tokens within a range of characters."""
    if characters is None:
        return None
    inside = [at for at, (begin, end) in enumerate(spans) if begin >= characters[0] and end <= characters[1]]
    return (inside[0], inside[-1] + 1) if inside else None


# --- tree to sequences ---

def sequences(code: ParsedCode) -> TreeSequences:
    """The distances and labels of a tree."""
    distances, labels, unary, _ = _flat(_binary(_nested(code)))
    return TreeSequences(distances, labels, unary)


def _nested(code: ParsedCode) -> Node:
    """The tree of the constituents, with the tokens that no child covers as children of their own."""
    root, *others = (Node(*each) for each in code.constituents)
    above = [root]
    for node in others:
        while node.end > above[-1].end:
            above.pop()
        above[-1].children.append(node)
        above.append(node)
    _add_tokens(root)
    return root


def _add_tokens(node: Node) -> None:
    children, at = [], node.first
    for child in node.children:
        children += [Node("", token, token + 1) for token in range(at, child.first)]
        _add_tokens(child)
        children.append(child)
        at = child.end
    node.children = [*children, *(Node("", token, token + 1) for token in range(at, node.end))]


def _binary(node: Node) -> Node:
    """The same tree with two children a node: chains are one label, and nodes of one token the token's label."""
    label = node.label
    while len(node.children) == 1 and node.children[0].children:
        node = node.children[0]
        label += JOINT + node.label
    if len(node.children) <= 1:
        return Node(label or EMPTY, node.first, node.end)
    first, *rest = node.children
    second = rest[0] if len(rest) == 1 else Node(EMPTY, rest[0].first, node.end, rest)
    return Node(label, node.first, node.end, [_binary(first), _binary(second)])


def _flat(node: Node) -> tuple[list[float], list[str], list[str], int]:
    """Distances, labels and unary labels of a binary tree, and its height."""
    if not node.children:
        return [], [], [node.label], 0
    left, right = map(_flat, node.children)
    height = max(left[3], right[3]) + 1
    return [*left[0], height, *right[0]], [*left[1], node.label, *right[1]], [*left[2], *right[2]], height


# --- sequences to tree ---

def constituents(tree: TreeSequences) -> list[Constituent]:
    """The constituents that distances and labels describe: the largest distance splits first, of equal ones the left
    one.
    """
    found, todo = [], [(0, len(tree.unary))]
    while todo:
        first, end = todo.pop()
        if end - first == 1:
            found += _named(tree.unary[first], first, end)
            continue
        split = max(range(first, end - 1), key=lambda at: tree.distances[at])
        label = tree.labels[split]
        found += _named(BAD_ROOT if label == EMPTY and end - first == len(tree.unary) else label, first, end)
        todo += [(first, split + 1), (split + 1, end)]
    return found


def _named(label: str, first: int, end: int) -> Iterator[Constituent]:
    """The constituents of a fused label; none of an empty one."""
    return (Constituent(part, first, end) for part in label.split(JOINT) if part != EMPTY)
