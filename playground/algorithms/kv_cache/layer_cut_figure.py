"""Events about a prompt that is shortened for later layers."""
from __future__ import annotations

from collections.abc import Iterator

from playground.events import Event, Figure, Note


def prompt_reading(prompt: int, layers: int, continued: dict[int, int]) -> Iterator[Event]:
    """How many prompt tokens each layer read, and what that saved.

    `continued` gives the number of tokens read from a layer on, by that layer.
    """
    read = [prompt]
    for layer in range(1, layers):
        read.append(continued.get(layer, read[-1]))
    labels = [f"layer {layer}" for layer in range(layers)]
    yield Figure("bars", "prompt tokens read", {"labels": labels, "values": read})
    counts = " and ".join(f"{count} past layer {layer - 1}" for layer, count in sorted(continued.items()))
    yield Note(
        f"Of the prompt's {prompt} tokens {counts} were read: {sum(read)} token-layer computations instead of "
        f"{prompt * layers}."
    )
