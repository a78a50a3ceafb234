"""Drafts from one table of hashed n-grams, as in llama.cpp."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import chain
from playground.errors import Refusal
from playground.events import Figure

FACTOR, WORD = 6364136223846793005, 1 << 64  # of the hash: a multiplier, and the size of a machine word


class NgramMod(Drafter):
    """One table says which token followed an n-gram last, under a number that the n-gram is hashed to; a draft reads it
    again and again. No draft model, and memory that does not grow.

    Nothing checks that an entry belongs to the n-gram that is looked up: where two have the same number, the later one
    counts and the draft is wrong, which costs a row and no correctness. Long n-grams make few and sure drafts. The
    engine shares a table among texts and empties it after bad rounds; here each text has its own, so that no text
    shows up in another. most = 0 is plain decoding. llama.cpp 2026, pull request 19164.
    """

    name, title, paper, sheet = "ngram_mod", "N-gram table (llama.cpp)", "llama.cpp 2026", "speculative/prompt-lookup"
    guarantee, new_in = ("collapses",), "2026"

    n: int = knob(4, 1, 32, step=1, help="tokens of an n-gram; llama.cpp has 24, for long texts")
    least: int = knob(1, 1, 64, step=1, help="shorter drafts are not used")
    most: int = knob(16, 0, 64, step=1, help="draft tokens per round; 0 is plain decoding")
    size: int = knob(65536, 1, 4194304, step=1, help="entries of the table; llama.cpp has 4194304")

    def check(self):
        if self.most and self.least > self.most:
            raise Refusal(f"least is {self.least} and at most {self.most} are drafted: lower least.", "least")

    def __post_init__(self):
        self._table: dict[int, int] = {}  # the token after an n-gram, by its number
        self._read = 0  # tokens of the text whose n-grams are in the table

    def propose(self, lm: Lane, budget) -> Iterator:
        if not self.most:
            return chain([], self.name)
        self.read(lm.tokens)
        drafted = self.look_up(lm.tokens, min(self.most, budget), lm.ends)
        series = {"entries in use": len(self._table), "draft tokens": len(drafted)}
        yield Figure("scalar", "table of n-grams", {"x": lm.generated, "series": series})
        return chain(drafted, self.name)

    def number(self, ngram: Sequence[int]) -> int:
        """The entry of an n-gram."""
        found = 0
        for token in ngram:
            found = (found * FACTOR + token) % WORD
        return found % self.size

    def read(self, text: Sequence[int]) -> None:
        """Enter what follows the n-grams of a text that has grown; later entries replace earlier ones."""
        for place in range(max(self.n, self._read), len(text)):
            self._table[self.number(text[place - self.n:place])] = text[place]
        self._read = len(text)

    def look_up(self, text: Sequence[int], count: int, ends=lambda token: False) -> list[int]:
        """Up to `count` draft tokens after a text."""
        drafted: list[int] = []
        while len(text) >= self.n and len(drafted) < count and not (drafted and ends(drafted[-1])):
            token = self._table.get(self.number([*text[-self.n:], *drafted][-self.n:]))
            if token is None:
                break
            drafted.append(token)
        return drafted if len(drafted) >= self.least else []
