"""The limits of a run."""
from __future__ import annotations

from dataclasses import dataclass

from playground.request_limits import check_length, check_stops, check_whole
from playground.run_request import RunRequest


@dataclass
class Limits:
    """What ends a text besides the model's end tokens, the seed, and the tokens the text begins with."""

    seed: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()  # tokens that the generated text begins with

    @classmethod
    def of(cls, request: RunRequest) -> Limits:
        """The limits that a checked request asks for."""
        return cls(request.seed, request.length, request.stops())

    def check(self) -> None:
        """Raise Refusal for a seed or a length that is no whole number, a length below 1, and an unusable stop string.
        """
        check_whole(self.seed, "seed", "seed")
        check_length(self.max_new_tokens)
        check_stops(self.stop)
