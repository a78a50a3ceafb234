"""Input-guided aggressive decoding: the text that is to be edited as drafter."""
from collections import defaultdict
from collections.abc import Iterator

from playground.contract import Drafter, knob
from playground.contract.token_tree import chain
from playground.errors import Refusal
from playground.events import Figure, Note


class Aggressive(Drafter):
    """Guess that the answer copies its input to the end; where it departs, write token by token until it joins the
    input again.

    The input is the passage given as context, or the prompt, or what follows some words of it. The answer has joined it
    again once its last token occurs there exactly once; if it occurs several times the last two decide, then the last
    three, and if those are not unique either, or occur nowhere, nothing is guessed. So short and certain, the opposite
    of prompt lookup. Made for corrections and edits of encoders' inputs, read here for a model that continues its
    prompt; the paper guesses the whole rest of the input, so `block` is ours, and block = 0 is plain decoding. Ge et
    al. 2022, arXiv
    2205.10350.
    """

    name, title, paper, sheet = (
        "aggressive",
        "Aggressive decoding (input-guided)",
        "2205.10350",
        "speculative/aggressive",
    )
    guarantee = ("collapses",)

    min_gram: int = knob(1, 1, 2, step=1, help="last tokens of the answer that are looked for first")
    max_gram: int = knob(3, 2, 6, step=1, help="last tokens of the answer that are looked for at most")
    block: int = knob(64, 0, 128, step=1, help="tokens of the input guessed at once; 0 is plain decoding")
    after: str = knob(
        "",
        help="words of the prompt after which the text to edit begins; without them the passage, or the whole prompt",
    )

    _source = None  # the input, token by token

    def propose(self, lm, budget) -> Iterator:
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
                yield Note(f"The answer joins the input again after {lm.text_of(answer[-length:])!r}.")
        place = len(self._source) if self._place is None else self._place
        yield Figure(
            "scalar",
            "place in the input",
            {
                "x": lm.generated,
                "series": {"next token to copy": self._place or 0},
                "lines": {"end of the input": len(self._source)},
            },
        )
        return chain(self._source[place:place + min(self.block, budget)], self.name)

    def _begin(self, lm) -> None:
        """Find the input. `_place` is its token that comes next, None while the answer goes its own way."""
        self.read(self._input(lm))

    def read(self, source) -> None:
        """Take tokens as the input, nothing of which was copied yet."""
        self._source, self._place, self._read = source, 0, 0
        self._ends = defaultdict(list)  # of each n-gram of the input: the places after it
        for n in range(self.min_gram, self.max_gram + 1):
            for end in range(n, len(source) + 1):
                self._ends[tuple(source[end - n:end])].append(end)

    def _input(self, lm) -> list[int]:
        """Token ids as they would stand at the beginning of an answer."""
        words = [token for token in lm.tokens[:lm.prompt_length] if not lm.special(token)]
        if self.after:
            _, found, rest = lm.text_of(words).rpartition(self.after)
            if not found:
                raise Refusal(
                    f"The prompt does not hold {self.after!r}: give words that stand right before the text to edit.",
                    "after",
                )
            return lm.spell(rest.strip())
        return lm.spell(lm.passage) if lm.passage else words

    def follow(self, answer) -> int:
        """How many of the answer's new tokens copied the input; after the first that did not, there is no place in it.
        """
        if self._place is None:
            return 0
        fresh, coming = answer[self._read:], self._source[self._place:]
        copied = next(
            (i for i, (token, copy) in enumerate(zip(fresh, coming)) if token != copy), min(len(fresh), len(coming))
        )
        self._place = self._place + copied if copied == len(fresh) else None
        return copied

    def join(self, answer) -> tuple[int | None, int]:
        """The place after the shortest ending of the answer that the input holds exactly once, and that ending's
        length.
        """
        for n in range(self.min_gram, min(self.max_gram, len(answer)) + 1):
            ends = self._ends.get(tuple(answer[-n:]), [])
            if len(ends) < 2:
                return (ends[0], n) if ends else (None, n)
        return None, 0
