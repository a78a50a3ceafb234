"""Prompt lookup: the text itself as drafter."""
from collections.abc import Iterator

from playground.contract import Drafter, knob
from playground.contract.token_tree import chain


class PromptLookup(Drafter):
    """If the last few tokens occurred before, guess that what followed them then follows again. No second model.

    The longest ending of the text, from n_max tokens down to n_min, that occurs earlier gives the guess: what came
    after its earliest occurrence, or its latest. Strong where the answer repeats the prompt, as in edits. Three public
    versions: A. Saxena's script of 2023 takes only an occurrence that a whole guess of `depth` tokens follows, and a
    shorter ending where there is none; the transformers library takes any, and cuts the guess before a token that ends
    the text; vLLM takes any and cuts nothing.
    """

    name, title, paper, sheet = "prompt_lookup", "Prompt lookup", "Saxena 2023", "speculative/prompt-lookup"
    guarantee = ("collapses",)

    n_max: int = knob(3, 1, 8, step=1, help="longest ending that is looked up, in tokens")
    n_min: int = knob(1, 1, 4, step=1, help="shortest ending that is looked up, in tokens")
    depth: int = knob(10, 0, 32, step=1, help="tokens guessed; 0 is plain decoding")
    occurrence: str = knob("earliest", choices=("earliest", "latest"), help="which earlier occurrence is followed")
    variant: str = knob(
        "transformers",
        choices=("transformers", "vllm", "original"),
        help="whose rules for short guesses and for tokens that end the text",
    )

    def propose(self, lm, budget) -> Iterator:
        yield from ()
        return chain(self.guess(lm.tokens, min(self.depth, budget), lm.ends), self.name)

    def guess(self, text, count, ends=lambda token: False) -> list[int]:
        """Up to `count` tokens that followed an earlier occurrence of the text's ending."""
        for n in range(min(self.n_max, len(text) - 1), self.n_min - 1, -1):
            start = self._find(text, n, count)
            if start is not None and count > 0:
                followed = text[start + n:start + n + count]
                cut = (
                    next((i for i, token in enumerate(followed) if ends(token)), count)
                    if self.variant == "transformers"
                    else count
                )
                return followed[:cut]
        return []

    def _find(self, text, n, count) -> int | None:
        """Where the last n tokens occurred before, themselves left out; in the original only where `count` tokens
        follow.
        """
        too_late = count - 1 if self.variant == "original" else 0
        pattern, starts = text[-n:], range(len(text) - n - too_late)
        order = starts if self.occurrence == "earliest" else reversed(starts)
        return next((i for i in order if text[i] == pattern[0] and text[i:i + n] == pattern), None)
