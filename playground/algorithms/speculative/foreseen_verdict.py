"""All that a verdict by rejection may need of a device, computed for every node and read in one transfer.

Which draft tokens are accepted is decided on the host, one after the other; a GPU would be waited for each time. So the
distributions that are left after each rejection are computed for all nodes at once, with the tokens that would be drawn
from them, and what is recorded of the rows is read with them.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.speculative.verification import SHOWN, Chances, Ruling, drawn_from, first_chances
from playground.engine.host_copies import on_device
from playground.engine.sampling import largest, residual_distribution

if TYPE_CHECKING:
    from playground.contract import Lane
    from playground.contract.token_tree import TokenTree
    from playground.decoding.rows import Rows


@dataclass
class Foreseen:
    """What was read before the verdict; nothing on a CPU, which need not be waited for."""

    chances: Chances = field(default_factory=dict)
    redraws: dict[int, int] = field(default_factory=dict)  # by node, what is drawn if all its children are rejected
    likely: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # and the most probable tokens then

    def redraw(self, lm: Lane, rest: Tensor, node: int, position: int) -> int:
        """The token in place of rejected children, drawn from the distribution `rest` [V] that is left."""
        if node not in self.redraws:
            return lm.draw(rest, position, "redraw")
        lm.uniform(position, "redraw")  # the draw is made
        return self.redraws[node]

    def completed(self, ruling: Ruling, node: int) -> Ruling:
        """The ruling at a node with the most probable tokens in place of rejected children, if they were read."""
        if ruling.child is None:
            ruling.likely = self.likely.get(node)
        return ruling


def foresee(lm: Lane, tree: TokenTree, rows: Rows) -> Foreseen:
    """What `reject` and `walk` ask of rows on a device; rows know the tokens that `pick` will choose."""
    nodes, families = list(range(rows.first, rows.first + rows.count)), tree.families()
    repeated = any(len(set(own)) < len(own) for own in families.values())  # each time with another chance
    if rows.raw.is_cpu or repeated or not rows.chain.draws:
        return Foreseen(first_chances(tree, rows))
    children = [families.get(node, []) for node in nodes]
    left, chances = _after_rejections(tree, rows.p, children)
    keys = [[("redraw" if own else "token", rows.position(node), 0 if own else rows.sequence.lineage)]
            for node, own in zip(nodes, children)]
    drawn, best = lm.foresee(left, keys), largest(left, min(SHOWN, left.shape[1]))
    tokens = on_device(_padded([[tree.tokens[child] for child in own] for own in children]), left.device, torch.long)
    found, columns = Foreseen(), rows.read_with(list(range(rows.count)), torch.cat([drawn, tokens], 1), chances, *best)
    for node, own, ((token, *_), read, shares, ids) in zip(nodes, children, columns):
        found.chances |= dict(zip(own, zip(read[::2], read[1::2])))
        place = found.redraws if own else rows.foreseen
        place[node] = int(token)
        found.likely[node] = [(int(each), share) for each, share in zip(ids, shares)]
    return found


def _after_rejections(tree: TokenTree, p: Tensor, children: list[list[int]]) -> tuple[Tensor, Tensor]:
    """What is left of distributions p [n, V] if all children of each row are rejected, and the chances of each child
    under what was left before and under its own distribution, [n, 2 * most children].
    """
    left, found = p, [p.new_zeros(len(p), 0)]
    for number in range(max(map(len, children))):
        rows = [row for row, own in enumerate(children) if len(own) > number]
        index = on_device(rows, p.device, torch.long)
        offered = torch.stack([_offered(tree, children[row], number, p[row]) for row in rows])
        tokens = on_device([[tree.tokens[children[row][number]]] for row in rows], p.device, torch.long)
        r = left[index]
        both = torch.cat([r.gather(1, tokens), offered.gather(1, tokens)], 1)
        found.append(p.new_zeros(len(p), 2).index_copy(0, index, both.to(p)))
        left = left.index_copy(0, index, residual_distribution(r, offered).to(p))
    return left, torch.cat(found, 1)


def _offered(tree: TokenTree, children: list[int], number: int, like: Tensor) -> Tensor:
    """The distribution [V] of a child after the rejection of its earlier siblings."""
    return drawn_from(children[number], tree, [tree.tokens[child] for child in children[:number]], like)


def _padded(lists: list[list[int]]) -> list[list[int]]:
    """Lists of the same length, filled with zeros."""
    length = max(map(len, lists))
    return [[*own, *[0] * (length - len(own))] for own in lists]
