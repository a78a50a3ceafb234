"""How drafters grow a tree: level by level, one forward of a stream for each, children from the rows of their parents.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from playground.contract.token_tree import ROOT, TokenTree
from playground.errors import Refusal

if TYPE_CHECKING:
    from torch import Tensor

    from playground.algorithms.speculative.without_replacement import Urn
    from playground.contract import Drafter
    from playground.decoding.lane import Lane
    from playground.decoding.rows import Rows
    from playground.decoding.stream import Exit, Stream

Level = Callable[["Rows", list[int], int], list[int]]
"""level(rows, leaves, its number from 0) adds children to the leaves and returns those that may have children
themselves.
"""


Stop = Callable[[TokenTree], bool]
"""stop(chain) says after each guess whether to ask the target now. It may look at any guess that was made, for all of
them are sent; a guess that were dropped for what it is would bend the law."""


def check_chain(name: str, drafter: Drafter) -> None:
    """Refuse drafters whose guesses branch, for a decoder of that name which reckons with chains."""
    if drafter.name not in ("draft_model", "prompt_lookup") or getattr(drafter, "width", 1) > 1:
        raise Refusal(f"{name} reckons with chains: take draft_model with width 1, or prompt_lookup.", "drafter")


def new_tree(lm: Lane, drafter: Drafter) -> TokenTree:
    """An empty tree of a drafter's; where the lane leaves nothing to chance, guesses are not drawn either."""
    return TokenTree(drafter.name, drafter.drawn if lm.chain.draws else "deterministic")


def grow(lm: Lane, stream: Stream | Exit, tree: TokenTree, depth: int, level: Level) -> Iterator:
    """Add up to `depth` levels to an empty tree, none below a guess that ends the text; returns it."""
    leaves = [ROOT]
    for number in range(depth):
        rows = yield stream.extend(tree)
        leaves = [leaf for leaf in level(rows, leaves, number) if not lm.ends(tree.tokens[leaf])]
        if not leaves:
            break
    return tree


def chain_until(lm: Lane, stream: Stream | Exit, tree: TokenTree, depth: int, stop: Stop) -> Iterator:
    """Make of an empty tree a chain of at most `depth` guesses, each from the row after the one before; `stop` may end
    it sooner. Returns it.
    """
    def level(rows: Rows, leaves: list[int], number: int) -> list[int]:
        made = independent(lm, tree, rows, leaves[0], 1)
        return [] if made and stop(tree) else made

    return grow(lm, stream, tree, depth, level)


def guess_row(lm: Lane, tree: TokenTree, rows: Rows, leaf: int) -> Tensor | None:
    """Distribution [V] of what follows a leaf; None where nothing can: the guess ends the text, or the grammar cannot
    continue it.
    """
    if leaf != ROOT and lm.ends(tree.tokens[leaf]):
        return None
    q = rows.scores[rows.row(leaf)].softmax(-1)
    return None if rows.masks is not None and q.isnan().any() else q


def best(tree: TokenTree, leaf: int, q: Tensor, width: int) -> list[int]:
    """The `width` most probable tokens become children of a leaf."""
    top = q.topk(min(width, len(q)))
    return [tree.add(token, leaf, confidence=p) for p, token in zip(top.values.tolist(), top.indices.tolist()) if p > 0]


def independent(lm: Lane, tree: TokenTree, rows: Rows, leaf: int, width: int) -> list[int]:
    """Children of a leaf, drawn independently, so siblings may repeat; the most probable ones where the lane does not
    draw.
    """
    q = guess_row(lm, tree, rows, leaf)
    if q is None:
        return []
    if not lm.chain.draws:
        return best(tree, leaf, q, width)
    return [tree.add(lm.draw(q, rows.position(leaf), purpose(leaf, i)), leaf, q) for i in range(width)]


def distinct(lm: Lane, urn: Urn, leaf: int, position: int) -> int:
    """The next token out of the urn of a leaf, for a position of the sequence."""
    return urn.take(lambda rest: lm.draw(rest, position, purpose(leaf, urn.taken)))


def purpose(leaf: int, child: int) -> str:
    """What a guess is drawn for. Drafters that share this name share their chances where their trees are alike."""
    return f"draft/{leaf}/{child}"
