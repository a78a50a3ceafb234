"""Figures about how a context changes the distribution of a token."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from playground.engine.sampling import contrast, first_largest
from playground.events import Event, Figure, Note

if TYPE_CHECKING:
    from torch import Tensor


def context_events(
    rows: dict[str, Tensor], alpha: float, divergence: float, token: int, position: int
) -> Iterator[Event]:
    """Events about the token committed at `position`; `rows` are logits [V] of "target" and "without_context".

    `divergence` is the Jensen-Shannon divergence of the two, in nats.
    """
    given, memory = rows["target"], rows["without_context"]
    adjusted = contrast(given, memory, alpha)
    probabilities = {
        name: float(row.softmax(-1)[token])
        for name, row in (("with context", given), ("without", memory), ("adjusted", adjusted))
    }
    series = {"alpha": alpha, "divergence, nats": divergence}
    yield Figure("scalar", "context against memory", {"x": position, "series": series})
    yield Figure("scalar", "probability of the chosen token", {"x": position, "series": probabilities})
    best = first_largest(given)
    if best != first_largest(memory):
        spans = [[position, position + 1, "divergence, nats", divergence]]
        yield Figure("spans", "where context and memory disagree", {"spans": spans})
    if best != first_largest(adjusted):
        yield Note("The contrast changes the most probable token.")
