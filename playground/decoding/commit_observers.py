"""What samplers and the constraint learn from the tokens of a commit, and say about them."""
from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playground.contract import Sampler
    from playground.decoding.rows import Rows
    from playground.decoding.sequence import Sequence
    from playground.events import Event


def observe_commit(rows: Rows, path: list[tuple[int, int]], by: Sequence) -> Iterator[Event]:
    """Pass the tokens that a sequence committed, each with the node it follows, to samplers and the constraint.

    Yields their events.
    """
    # the samplers of the committing sequence, which may differ from that of the rows
    own = {sampler.name: sampler for sampler in by.chain.samplers}
    for node, token in path:
        if rows.chain.constraint and rows.chain.constraint.explains:
            yield from rows.chain.constraint.explain(rows.committed + rows.tree.prefix(node), token)
        if own:
            yield from _observe_samplers(rows, node, token, own)


def _observe_samplers(rows: Rows, node: int, token: int, own: dict[str, Sampler]) -> Iterator[Event]:
    row, position = rows.row(node), rows.position(node) - rows.sequence.start
    for before, stage in pairwise(rows.stages_of([row])):
        if stage.sampler is not None and stage.sampler.explains:
            yield from own[stage.name].explain(before.scores[0], rows.committed + rows.tree.prefix(node), token)
        if stage.sampler is None or not stage.sampler.observes:
            continue
        others = {name: raw[row] for name, raw in rows.others.items()} if stage.sampler.stage == "mix" else {}
        yield from own[stage.name].observe({**others, rows.stream: before.scores[0]}, token, position)
