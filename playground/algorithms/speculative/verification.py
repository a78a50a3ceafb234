"""Holding a tree of guesses against the target: the walk all verifiers share, and the exact rejection rule.

The walk goes from the root down. At each node a rule says which child stands, if any; where none does, the rule names
the token that replaces them, and where there is none to ask about, the target's own row gives one token more, the
bonus.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import certain, leftover
from playground.events import Candidate, Test, Verdict

if TYPE_CHECKING:
    from playground.decoding.lane import Lane
    from playground.decoding.rows import Rows

SHOWN = 8  # tokens of a leftover distribution that are named


@dataclass
class Ruling:
    """What a rule said at one node: the child that stands, or the token that replaces all children."""

    child: int | None = None
    token: int = -1
    tests: list[Test] = field(default_factory=list)
    leftover: Tensor | None = None  # what the token was drawn from, [V]


Rule = Callable[[int, list[int]], Ruling]


def walk(lm: Lane, tree: TokenTree, rows: Rows, rule: Rule) -> Verdict:
    """The verdict of a rule on a whole tree. A guess that ends the text ends the walk, and no token follows it.

    Nor does one follow a guess the target has not read yet: where guessing runs ahead of checking, what is below waits
    for the next forward.
    """
    verdict, node = Verdict(), ROOT
    while not rows.unread(node) and not _is_over(lm, tree, rows, node):
        children = tree.children(node)
        if not children:
            verdict.token, verdict.origin = lm.pick(rows, node).token, "bonus" if len(tree) else "sampled"
            return verdict
        ruling = rule(node, children)
        verdict.tests += ruling.tests
        if ruling.child is None:
            verdict.token, verdict.origin = ruling.token, "redraw"
            verdict.leftover = _named(lm, ruling.leftover)
            return verdict
        node = ruling.child
        verdict.kept.append(node)
    return verdict


def _is_over(lm: Lane, tree: TokenTree, rows: Rows, node: int) -> bool:
    """Whether nothing can follow a node: it ends the text, or the grammar is complete there."""
    complete = rows.masks is not None and not bool(rows.masks[rows.row(node)].any())
    return node != ROOT and (complete or lm.ends(tree.tokens[node]))


def match(token: int, children: list[int], tree: TokenTree, p: Tensor) -> Ruling:
    """The child that guessed `token`; without one the token itself stands in their place."""
    child = next((c for c in children if tree.tokens[c] == token), None)
    looked_at = children if child is None else children[:children.index(child) + 1]
    tests = [Test(c, float(p[tree.tokens[c]]), tree.confidence[c], None, c == child) for c in looked_at]
    return Ruling(child, token, tests, p if child is None else None)


def reject(p: Tensor, children: list[int], tree: TokenTree, flip: Callable[[float], tuple[bool, float]],
           draw: Callable[[Tensor], int]) -> Ruling:
    """Accept each child with min(1, r/d) in the order they were drawn; exact for every way of drawing that trees know.

    r starts as p and loses d after each refusal. d is the distribution the child was drawn from: q as it stands for
    independent children, q without the earlier ones where they were drawn without replacement, all on the child itself
    where it was certain. arXiv 2211.17192, 2302.01318 (one child), 2305.09781 (independent), 2402.14160 (without
    replacement).
    """
    r, tests, taken = p, [], []
    for child in children:
        token, d = tree.tokens[child], _drawn_from(child, tree, taken, p)
        chance, offered = float(r[token]), float(d[token])
        accepted, u = flip(min(1.0, chance / offered) if offered else 1.0)
        tests.append(Test(child, chance, offered, u, accepted))
        if accepted:
            return Ruling(child, tests=tests)
        r = leftover(r, d)
        taken.append(token)
    return Ruling(None, draw(r), tests, r)


def _drawn_from(child: int, tree: TokenTree, taken: list[int], like: Tensor) -> Tensor:
    q, token = tree.q[child], tree.tokens[child]
    if q is None:
        return certain(token, like)
    if tree.drawn != "without_replacement" or not taken:
        return q
    rest = q.index_fill(0, torch.tensor(taken, device=q.device), 0)
    return rest / rest.sum()


def _named(lm: Lane, distribution: Tensor | None) -> list[Candidate]:
    if distribution is None:
        return []
    values, ids = distribution.topk(min(SHOWN, len(distribution)))
    return [
        Candidate(token, lm.piece(token), value, value)
        for token, value in zip(ids.tolist(), values.tolist())
        if value > 0
    ]
