"""Where a run ends."""
from dataclasses import dataclass


@dataclass
class Limits:
    """What ends a text besides the model's own end token, and the seed of its draws."""

    seed: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()  # tokens the text begins with after the prompt
