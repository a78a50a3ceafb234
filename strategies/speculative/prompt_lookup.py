"""Prompt lookup: n-gram matches in the text as drafts."""
from collections.abc import Iterator

from playground.algorithms.speculative.ngram_index import NGramIndex
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import chain


class PromptLookup(Drafter):
    """If the last few tokens occurred before, draft the tokens that followed them. No draft model.

    The longest n-gram at the end of the text that occurs earlier, from n_max tokens down to n_min, selects the draft:
    the tokens after its earliest or latest occurrence. Effective if the answer repeats the prompt, as in editing. Three
    public variants: A. Saxena's script of 2023 accepts only occurrences followed by a whole draft of `depth` tokens and
    falls back to a shorter n-gram; the transformers library accepts any and truncates the draft before an end token;
    vLLM accepts any and does not truncate.
    """

    name, title, paper, sheet = "prompt_lookup", "Prompt lookup", "Saxena 2023", "speculative/prompt-lookup"
    guarantee = ("collapses",)

    n_max: int = knob(3, 1, 8, step=1, help="longest n-gram to look up, in tokens")
    n_min: int = knob(1, 1, 4, step=1, help="shortest n-gram to look up, in tokens")
    depth: int = knob(10, 0, 32, step=1, help="draft tokens per round; 0 is plain decoding")
    occurrence: str = knob("earliest", choices=("earliest", "latest"), help="which earlier occurrence to copy from")
    variant: str = knob(
        "transformers",
        choices=("transformers", "vllm", "original"),
        help="whose rules apply to short drafts and to end tokens",
    )

    _indexes = None  # by n

    def propose(self, lm: Lane, budget) -> Iterator:
        yield from ()
        return chain(self.look_up(lm.tokens, min(self.depth, budget), lm.ends), self.name)

    def look_up(self, text, count, ends=lambda token: False) -> list[int]:
        """Up to `count` tokens that followed an earlier occurrence of the text's last n-gram."""
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
        """Start of an earlier occurrence of the last n tokens; the original variant needs `count` tokens after it."""
        excluded = count - 1 if self.variant == "original" else 0
        index = self._indexed(text, n)
        find = index.earliest if self.occurrence == "earliest" else index.latest
        return find(text[-n:], len(text) - n - excluded)

    def _indexed(self, text, n) -> NGramIndex:
        """The index of the n-grams of a text, which persists between rounds."""
        if self._indexes is None:
            self._indexes = {}
        index = self._indexes.setdefault(n, NGramIndex(n))
        index.follow(text)
        return index
