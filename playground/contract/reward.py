"""Rewards: how good is a text, or the beginning of one?"""
from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract.lane import Lane


@dataclass(eq=False)
class RewardedText:
    """A text that a search asks a reward about, complete or not."""

    tokens: list[int]  # prompt included
    logp: float = 0.0  # summed log-probability in nats of the tokens after the prompt, under the unmodified model
    # input of the target's lm_head [hidden_size] after the last token that does not end the text; None if not at hand
    state: Tensor | None = None


class Reward(Protocol):
    """Judges answers, and beginnings of answers, to the prompt of a lane."""

    def scores(self, lm: Lane, texts: list[RewardedText]) -> Generator[Any, Any, list[float]]:
        """A generator like `Decoder.decode`; returns one score for each text, 0 to 1, larger for a better text.

        The score of a text depends on that text alone.
        """
