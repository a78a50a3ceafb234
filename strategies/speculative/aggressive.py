"""Input-guided aggressive decoding: the text to edit is the draft."""
from collections import defaultdict
from collections.abc import Iterator

from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import chain
from playground.errors import Refusal
from playground.events import Figure, Note


class Aggressive(Drafter):
    """Draft the rest of the input verbatim; after a divergence, decode token by token until the answer matches the
    input again.

    The input is the passage given as context, the prompt, or the part of the prompt after given words. The answer
    matches again once its last token occurs exactly once in the input. If it occurs several times, the last two tokens
    are looked up, then the last three; if these are not unique or do not occur, nothing is drafted. Unlike prompt
    lookup it needs a short but unique match. The paper edits the input of an encoder; here a decoder-only model
    continues its prompt. The paper drafts the whole rest of the input, so `block` is our addition; block = 0 is plain
    decoding. Ge et al. 2022, arXiv 2205.10350.
    """

    name, title, paper, sheet = (
        "aggressive",
        "Aggressive decoding (input-guided)",
        "2205.10350",
        "speculative/aggressive",
    )
    guarantee = ("collapses",)

    min_gram: int = knob(1, 1, 2, step=1, help="shortest suffix of the answer to look up, in tokens")
    max_gram: int = knob(3, 2, 6, step=1, help="longest suffix of the answer to look up, in tokens")
    block: int = knob(64, 0, 128, step=1, help="maximum draft tokens per round; 0 is plain decoding")
    after: str = knob(
        "",
        help="words of the prompt before the text to edit; if empty, the passage or the whole prompt is edited",
    )

    _source = None  # tokens of the input

    def propose(self, lm: Lane, budget) -> Iterator:
        if self._source is None:
            self._begin(lm)
        answer = lm.tokens[lm.prompt_length:]
        copied, before = self.follow(answer), self._read
        self._read = len(answer)
        if copied:
            yield Figure(
                "spans", "copied from the input", {"spans": [[before, before + copied, "copied", self._place]]}
            )
        if self._place is None:
            self._place, length = self.join(answer)
            if self._place is not None:
                yield Note(f"The answer matches the input again after {lm.text_of(answer[-length:])!r}.")
        place = len(self._source) if self._place is None else self._place
        yield Figure(
            "scalar",
            "position in the input",
            {
                "x": lm.generated,
                "series": {"next token to copy": self._place or 0},
                "lines": {"end of the input": len(self._source)},
            },
        )
        return chain(self._source[place:place + min(self.block, budget)], self.name)

    def _begin(self, lm: Lane) -> None:
        """Find the input. `_place` is the index of its next token to copy, None while the answer diverges."""
        self.read(self._input(lm))

    def read(self, source) -> None:
        """Set the input to these tokens, with the next token to copy at its start."""
        self._source, self._place, self._read = source, 0, 0
        self._ends = defaultdict(list)  # for each n-gram of the input: the positions after it
        for n in range(self.min_gram, self.max_gram + 1):
            for end in range(n, len(source) + 1):
                self._ends[tuple(source[end - n:end])].append(end)

    def _input(self, lm: Lane) -> list[int]:
        """Token ids of the input, encoded as at the start of an answer."""
        words = [token for token in lm.tokens[:lm.prompt_length] if not lm.special(token)]
        if self.after:
            _, found, rest = lm.text_of(words, after=[]).rpartition(self.after)
            if not found:
                raise Refusal(
                    f"The prompt does not contain {self.after!r}: give the words right before the text to edit.",
                    "after",
                )
            return lm.spell(rest.strip())
        return lm.spell(lm.passage) if lm.passage else words

    def follow(self, answer) -> int:
        """Count the answer's new tokens that copy the input, and advance; `_place` becomes None at a divergence."""
        if self._place is None:
            return 0
        new, expected = answer[self._read:], self._source[self._place:]
        copied = next(
            (i for i, (token, copy) in enumerate(zip(new, expected)) if token != copy), min(len(new), len(expected))
        )
        self._place = self._place + copied if copied == len(new) else None
        return copied

    def join(self, answer) -> tuple[int | None, int]:
        """The position after the shortest suffix of the answer that occurs exactly once in the input, and its length.

        The position is None if there is no such suffix.
        """
        for n in range(self.min_gram, min(self.max_gram, len(answer)) + 1):
            ends = self._ends.get(tuple(answer[-n:]), [])
            if len(ends) < 2:
                return (ends[0], n) if ends else (None, n)
        return None, 0
