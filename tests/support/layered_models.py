"""Models that draft with their own first layers."""
from __future__ import annotations

from architectures import tiny
from toys import byte_tokenizer

from playground.decoding.limits import Limits
from playground.engine.model import Model

ARCHITECTURES = ("llama", "qwen3", "gemma2", "gpt2")


def layered(architecture: str) -> Model:
    return Model(tiny(architecture), byte_tokenizer(), architecture)


LIMITS, START = Limits(0, 18), [5, 9, 2, 7, 7, 1]
