"""Defaults of `bench bookkeeping`. Imports neither torch nor transformers, so that options are parsed at once."""
from __future__ import annotations

from dataclasses import dataclass

MILLISECONDS, BYTES = 2.0, 2000  # limits, per token or round and per token
COMMAND = "python -m playground bench bookkeeping --out docs/bookkeeping.json --page docs/bookkeeping.md"


@dataclass(frozen=True)
class Sizes:
    """Of the model stand-in and of a run."""

    vocabulary: int = 150_000
    layers: int = 32
    context: int = 32_768  # tokens of the prompt
    watched: int = 2_048  # tokens of the prompt, where the attention weights or logits of all of it are read
    tokens: int = 32  # generated
    seconds: int = 60  # after which a lane is stopped


QUICK = Sizes(vocabulary=20_000, layers=4, context=2_048, watched=512, tokens=8, seconds=10)
