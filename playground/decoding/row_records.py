"""What the host reads of rows of logits, and what is recorded of those that tokens were chosen from."""
from __future__ import annotations

from typing import NamedTuple


class RowReading(NamedTuple):
    """What the host reads of a row of logits."""

    best: int  # the token with the largest logit
    entropy: float  # in nats
    ids: list[int]  # the most probable tokens, in descending order
    p: list[float]  # their probabilities
    logp: list[float]  # their log-probabilities


class RowRecord(NamedTuple):
    """What is recorded of the row a token was chosen from."""

    token: int
    entropy: float  # in nats, of the model's own distribution
    final_entropy: float  # after masks and samplers
    logprob: float  # of the token, in the model's own distribution
    ids: list[int]  # the most probable tokens, in descending order
    p: list[float]  # their probabilities
    final_p: list[float]  # after masks and samplers
    removed_by: list[str | None]  # the first stage that removed each
    mask: list[list[float]] = []  # columns of `mask_numbers`; empty without a grammar
