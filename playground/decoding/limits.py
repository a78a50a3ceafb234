"""The limits of a run."""
from dataclasses import dataclass

from playground.errors import Refusal
from playground.request_limits import check_text, quoted


@dataclass
class Limits:
    """What ends a text besides the model's end tokens, the seed, and the tokens the text begins with."""

    seed: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()  # tokens that the generated text begins with

    def check(self) -> None:
        """Raise Refusal for a seed or a length that is no whole number, a length below 1, and an unusable stop string.
        """
        for name, number in (("seed", self.seed), ("max_new_tokens", self.max_new_tokens)):
            if type(number) is not int:
                raise Refusal(f"{name} must be a whole number, not {quoted(number)}.", name)
        if self.max_new_tokens < 1:
            raise Refusal("The length must be at least 1 token.", "max_new_tokens")
        for stop in self.stop:
            check_text(stop, "stop string", about="stop")
            if not stop:
                raise Refusal("A stop string is empty and would match immediately: remove it.", "stop")
