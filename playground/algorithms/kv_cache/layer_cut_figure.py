"""A prompt of which later layers read a part: what is shown of it."""
from __future__ import annotations

from collections.abc import Iterator

from playground.events import Event, Figure, Note


def staircase(prompt: int, layers: int, went_on: dict[int, int]) -> Iterator[Event]:
    """How many of a prompt's tokens each layer has read, and what that spared; `went_on` says how many there were from
    a layer on.
    """
    read = [prompt]
    for layer in range(1, layers):
        read.append(went_on.get(layer, read[-1]))
    yield Figure(
        "bars", "prompt tokens read", {"labels": [f"layer {layer}" for layer in range(layers)], "values": read}
    )
    gone = " and ".join(f"{count} behind layer {layer - 1}" for layer, count in sorted(went_on.items()))
    yield Note(
        f"Of the prompt's {prompt} tokens there went on {gone}: reading it took {sum(read)} passes of a token through a layer, not {prompt * layers}."
    )
