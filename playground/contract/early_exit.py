"""An early exit of a model: its lm_head applied to the output of an inner layer."""
from __future__ import annotations

from typing import NamedTuple


class EarlyExit(NamedTuple):
    """The logits of a stream after only `layer` of its layers; 0 is the embeddings.

    The lm_head reads the hidden state after the final norm, or without it if `norm` is False.
    """

    stream: str
    layer: int
    norm: bool = True
