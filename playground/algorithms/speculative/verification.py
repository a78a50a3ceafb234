"""Verification of a draft tree: the walk shared by all verifiers, and the exact rejection rule.

The walk starts at the root. At each node a rule decides which child is accepted, if any. If it rejects all children it
supplies the token that replaces them. At a leaf the target's row yields a bonus token.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.host_copies import on_device
from playground.engine.sampling import one_hot, read_largest, residual_distribution
from playground.events import Candidate, Test, Verdict

if TYPE_CHECKING:
    from playground.contract import Lane
    from playground.decoding.rows import Rows

SHOWN = 8  # tokens of a residual distribution listed in the verdict


@dataclass
class Ruling:
    """The outcome of a rule at one node: the accepted child, or the token that replaces all children."""

    child: int | None = None
    token: int = -1
    tests: list[Test] = field(default_factory=list)
    residual: Tensor | None = None  # distribution of `token`, [V]; None if it is certain
    likely: list[tuple[int, float]] | None = None  # its most probable tokens, if they are known


Rule = Callable[[int, list[int]], Ruling]


def walk(lm: Lane, tree: TokenTree, rows: Rows, rule: Rule) -> Verdict:
    """Apply a rule from the root down and return the verdict.

    An accepted end token ends the walk without a further token. So does a draft token that the target has not read yet
    (drafting may run ahead of verification); its descendants wait for the next forward.
    """
    verdict, node, families = Verdict(), ROOT, tree.families()
    unread = rows.first + rows.count  # the first node that the target has not read
    while node < unread and not is_over(lm, tree, rows, node):
        children = families.get(node)
        if not children:
            verdict.token, verdict.origin = lm.pick(rows, node).token, "bonus" if len(tree) else "sampled"
            return verdict
        ruling = rule(node, children)
        verdict.tests += ruling.tests
        if ruling.child is None:
            verdict.token, verdict.origin = ruling.token, "redraw"
            verdict.leftover = leftover(lm, ruling)
            return verdict
        node = ruling.child
        verdict.kept.append(node)
    return verdict


def is_over(lm: Lane, tree: TokenTree, rows: Rows, node: int) -> bool:
    """Whether no token can follow a node: it is an end token, or the grammar is complete there."""
    return node != ROOT and (tree.tokens[node] in lm.end_ids or (rows.masks is not None and rows.dead_end(node)))


def match(token: int, children: list[int], tree: TokenTree, p: Tensor | None = None) -> Ruling:
    """Accept the child that equals `token`; without one, `token` replaces the children.

    p is the distribution of `token`, [V]; None if it is certain, as the most probable token is.
    """
    child = next((c for c in children if tree.tokens[c] == token), None)
    tested = children if child is None else children[:children.index(child) + 1]
    found = [tree.tokens[c] for c in tested]
    chances = [float(f == token) for f in found] if p is None else torch.stack([p[f] for f in found]).tolist()
    tests = [Test(c, chance, tree.confidence[c], None, c == child) for c, chance in zip(tested, chances)]
    return Ruling(child, token, tests, p if child is None else None)


Chances = Mapping[int, tuple[float, float]]
"""Probabilities of a child under the target and under the distribution it was drawn from."""


def first_chances(tree: TokenTree, rows: Rows) -> Chances:
    """The chances of the first child of every node, in one transfer; none on a CPU, which need not be waited for."""
    read = range(rows.first, rows.first + rows.count)
    firsts = {node: children[0] for node, children in tree.families().items() if node in read}
    if rows.raw.is_cpu or not firsts:
        return {}
    p = [rows.p[rows.row(node), tree.tokens[child]] for node, child in firsts.items()]
    q = [p[0].new_ones(()) if tree.q[child] is None else tree.q[child][tree.tokens[child]] for child in firsts.values()]
    return dict(zip(firsts.values(), torch.stack([torch.stack(p), torch.stack(q)], 1).tolist()))


def reject(p: Tensor, children: list[int], tree: TokenTree, flip: Callable[[float], tuple[bool, float]],
           draw: Callable[[Tensor], int], known: Chances | None = None) -> Ruling:
    """Accept each child with probability min(1, r/d), in the order drawn. Exact for every kind of `tree.drawn`.

    r starts as p and becomes the residual norm(max(0, r - d)) after each rejection. d is the distribution the child was
    drawn from: q for independent children, q renormalised without the earlier siblings for sampling without
    replacement, one-hot for deterministic children. `known` is used for the first child. arXiv 2211.17192, 2302.01318
    (one child), 2305.09781 (independent), 2402.14160 (without replacement).
    """
    r, tests, taken = p, [], []
    chances = [known[child] for child in children if child in known] if known else []
    for number, child in enumerate(children):
        token, d = tree.tokens[child], drawn_from(child, tree, taken, p)
        chances = chances or _chances(r, children[number:], tree, taken)
        chance, offered = chances.pop(0)
        accepted, u = flip(min(1.0, chance / offered) if offered else 1.0)
        tests.append(Test(child, chance, offered, u, accepted, residual=bool(taken)))
        if accepted:
            return Ruling(child, tests=tests)
        r = residual_distribution(r, d)
        taken.append(token)
    return Ruling(None, draw(r), tests, r)


def _chances(r: Tensor, children: list[int], tree: TokenTree, taken: list[int]) -> list[list[float]]:
    """The chances of the next child; on a device those of all children, should each be rejected, in one transfer."""
    found, taken = [], list(taken)
    for child in children[:1] if r.is_cpu else children:
        token, d = tree.tokens[child], drawn_from(child, tree, taken, r)
        found.append(torch.stack([r[token], d[token]]))
        r = r if r.is_cpu else residual_distribution(r, d)
        taken.append(token)
    return torch.stack(found).tolist()


def drawn_from(child: int, tree: TokenTree, taken: list[int], like: Tensor) -> Tensor:
    """The distribution [V] that a child was drawn from, after siblings with the tokens `taken`."""
    q, token = tree.q[child], tree.tokens[child]
    if q is None:
        return one_hot(token, like)
    if tree.drawn != "without_replacement" or not taken:
        return q
    rest = q.index_fill(0, on_device(taken, q.device), 0)
    return rest / rest.sum()


def leftover(lm: Lane, ruling: Ruling) -> list[Candidate]:
    """The most probable tokens of what `ruling.token` was drawn from; the token alone in a lane that draws nothing."""
    p, top = ruling.residual if lm.chain.draws else None, ruling.likely
    if top is None:
        (top,) = [[(ruling.token, 1.0)]] if p is None else read_largest(p[None], min(SHOWN, len(p)))
    return [Candidate(token, lm.piece(token), p, p) for token, p in top if p > 0]
