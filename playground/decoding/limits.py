"""The limits of a run."""
from dataclasses import dataclass


@dataclass
class Limits:
    """What ends a text besides the model's end tokens, the seed, and the tokens the text begins with."""

    seed: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()  # tokens that the generated text begins with
