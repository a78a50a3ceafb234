"""What a context changed about one token: the same model read the text with the context and without it."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from playground.engine.sampling import contrast, jensen_shannon
from playground.events import Event, Figure, Note

if TYPE_CHECKING:
    from torch import Tensor


def told(rows: dict[str, Tensor], alpha: float, token: int, position: int) -> Iterator[Event]:
    """Events about the token kept at `position`; `rows` are the raw rows [V] of "target" and "without_context"."""
    given, memory = rows["target"], rows["without_context"]
    adjusted = contrast(given, memory, alpha)
    disagreement = float(jensen_shannon(given, memory))
    chances = {
        name: float(row.softmax(-1)[token])
        for name, row in (("with context", given), ("without", memory), ("adjusted", adjusted))
    }
    yield Figure(
        "scalar",
        "context against memory",
        {"x": position, "series": {"alpha": alpha, "divergence, nats": disagreement}},
    )
    yield Figure("scalar", "probability of the chosen token", {"x": position, "series": chances})
    likeliest = given.argmax()
    if likeliest != memory.argmax():
        yield Figure(
            "spans",
            "where context and memory disagree",
            {"spans": [[position, position + 1, "divergence, nats", disagreement]]},
        )
    if likeliest != adjusted.argmax():
        yield Note("The contrast turns the choice: without it another token would come first.")
