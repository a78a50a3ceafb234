"""Growing a draft tree level by level: one forward of a stream per level, children from the rows of their parents."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from playground.algorithms.speculative.unread_drafts import grow_unread, may_stay_unread, purpose
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.sampling import read_largest
from playground.errors import Refusal

if TYPE_CHECKING:
    from torch import Tensor

    from playground.algorithms.speculative.without_replacement import RemainingTokens
    from playground.contract import Drafter, Lane
    from playground.decoding.rows import Rows
    from playground.decoding.stream import Exit, Stream

Level = Callable[["Rows", list[int], int], list[int]]
"""level(rows, leaves, index) adds children to the leaves and returns those that may be expanded further."""


Stop = Callable[[TokenTree], bool]
"""stop(chain) says after each draft token whether to verify now. It may depend on every token drafted, because all of
them are sent to the target; dropping a draft token because of its value would bias the output distribution."""


def check_chain(name: str, drafter: Drafter) -> None:
    """Raise Refusal if the drafter's tree may branch; `name` is the decoder that needs a chain."""
    if drafter.name not in ("draft_model", "prompt_lookup") or getattr(drafter, "width", 1) > 1:
        raise Refusal(f"{name} supports chains only: choose draft_model with width 1, or prompt_lookup.", "drafter")


def new_tree(lm: Lane, drafter: Drafter) -> TokenTree:
    """An empty draft tree; its tokens are deterministic if the lane decodes greedily."""
    return TokenTree(drafter.name, drafter.drawn if lm.chain.draws else "deterministic")


def grow(lm: Lane, stream: Stream | Exit, tree: TokenTree, depth: int, level: Level) -> Iterator:
    """Add up to `depth` levels to an empty tree and return it. End tokens get no children."""
    leaves = [ROOT]
    for number in range(depth):
        rows = yield stream.extend(tree)
        leaves = [leaf for leaf in level(rows, leaves, number) if tree.tokens[leaf] not in lm.end_ids]
        if not leaves:
            break
    return tree


def chain_until(lm: Lane, stream: Stream | Exit, tree: TokenTree, depth: int, stop: Stop) -> Iterator:
    """Grow an empty tree into a chain of at most `depth` draft tokens and return it; `stop` may end it earlier."""
    def level(rows: Rows, leaves: list[int], number: int) -> list[int]:
        added = independent(lm, tree, rows, leaves[0], 1)
        return [] if added and stop(tree) else added

    return grow(lm, stream, tree, depth, level)


def grow_independent(lm: Lane, stream: Stream | Exit, tree: TokenTree, widths: list[int]) -> Iterator:
    """Grow an empty tree by one level for each width and return it; each leaf gets that many `independent` children."""
    if may_stay_unread(lm, stream):
        if (found := (yield from grow_unread(lm, stream, tree, widths))) is not None:
            return found
        tree = TokenTree(tree.source, tree.drawn)

    def level(rows: Rows, leaves: list[int], number: int) -> list[int]:
        return independent_level(lm, tree, rows, leaves, widths[number])

    return (yield from grow(lm, stream, tree, len(widths), level))


def draft_distribution(lm: Lane, tree: TokenTree, rows: Rows, leaf: int) -> Tensor | None:
    """Distribution [V] of the token after a leaf; None after an end token, or if the constraint allows no token."""
    if leaf != ROOT and tree.tokens[leaf] in lm.end_ids:
        return None
    q = rows.scores[rows.row(leaf)].softmax(-1)
    return None if rows.masks is not None and q.isnan().any() else q


def level_distributions(lm: Lane, tree: TokenTree, rows: Rows, leaves: list[int]) -> tuple[list[int], Tensor]:
    """The leaves that tokens can follow, and the distributions [n, V] of these tokens."""
    open_leaves = [leaf for leaf in leaves if leaf == ROOT or tree.tokens[leaf] not in lm.end_ids]
    q = rows.scores_of(open_leaves).softmax(-1)
    if rows.masks is None:
        return open_leaves, q
    allowed = [number for number, empty in enumerate(q.isnan().any(1).tolist()) if not empty]
    return [open_leaves[number] for number in allowed], q[rows.index(allowed)]


def best(tree: TokenTree, leaf: int, q: Tensor, width: int) -> list[int]:
    """Add the `width` most probable tokens as children of a leaf."""
    return best_of_level(tree, [leaf], q[None], width)


def best_of_level(tree: TokenTree, leaves: list[int], q: Tensor, width: int) -> list[int]:
    """Add the `width` most probable tokens as children of each leaf, by the distributions q [leaves, V]."""
    found = read_largest(q, min(width, q.shape[1]))
    return [
        tree.add(token, leaf, confidence=p)
        for leaf, best_tokens in zip(leaves, found) for token, p in best_tokens if p > 0
    ]


def independent(lm: Lane, tree: TokenTree, rows: Rows, leaf: int, width: int) -> list[int]:
    """Add `width` children to a leaf, sampled independently (siblings may repeat); the top tokens if greedy."""
    return independent_level(lm, tree, rows, [leaf], width)


def independent_level(lm: Lane, tree: TokenTree, rows: Rows, leaves: list[int], width: int) -> list[int]:
    """`independent` for each leaf of a level, which are read together."""
    leaves, q = level_distributions(lm, tree, rows, leaves)
    if not leaves:
        return []
    if not rows.chain.draws:
        return best_of_level(tree, leaves, q, width)
    drawn = lm.draw_each(q, [[(purpose(leaf, i), rows.position(leaf)) for i in range(width)] for leaf in leaves])
    return [tree.add(token, leaf, own, share) for leaf, own, row in zip(leaves, q, drawn) for token, share in row]


def distinct(lm: Lane, remaining: RemainingTokens, leaf: int, position: int) -> int:
    """Sample the next child of a leaf without replacement, for a position of the sequence."""
    return lm.draw_remaining(remaining, position, purpose(leaf, remaining.taken))


def add_distinct(lm: Lane, tree: TokenTree, remaining: RemainingTokens, leaf: int, position: int) -> int:
    """Add a child to a leaf, sampled without replacement."""
    token = distinct(lm, remaining, leaf, position)
    return tree.add(token, leaf, remaining.q, remaining.share(token))
