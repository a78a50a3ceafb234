"""Token healing: the seam between prompt and answer."""
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch

from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED
from playground.events import Figure, Note


class TokenHealing(Sampler):
    """Take the last tokens of the prompt back and let the model write their text again, joined with what follows.

    A prompt may end where the model has never seen a token end: after "http:" it expects no "//", which it knows as a
    part of "://". The longest end of the prompt with which a longer token begins is taken back, as whole tokens. Until
    it is written again, only tokens that agree with it are allowed, and only where tokens for the rest of it exist; so
    the text begins with the end of the prompt, shaded. Each token is renormalised by itself, which is not the model's
    law given the text. A chat prompt ends with its template, and nothing is taken back. With most = 0 this is the plain
    lane. The choice stays argmax unless another sampler draws. Lundberg et al. 2023 (guidance), whose engine looks back
    four tokens, too.
    """

    name, title, paper, sheet = "token_healing", "Token healing", "Lundberg 2023", "sampling/token-healing"
    stage, rank, draws = "penalty", 0, False
    guarantee, new_in = ("collapses",), "2026"

    most: int = knob(4, 0, 16, step=1, help="tokens at the end of the prompt that may be taken back; 0: none")

    def __post_init__(self):
        self._owed = b""  # what was taken back
        self._bytes: dict[int, bytes] = {}  # of all tokens with text
        self._fitting: dict[bytes, torch.Tensor] = {}  # ids that may come first, by what is still to be written

    def take_back(self, prompt: list[int], model: Any) -> int:
        tokens = model.tokens
        spelled = {token: tokens.bytes(token) for token in range(model.vocabulary) if not tokens.is_special(token)}
        self._bytes = {token: text for token, text in spelled.items() if text}
        count = covering([tokens.bytes(token) for token in self._last(prompt)], sorted(set(self._bytes.values())))
        self._owed = b"".join(tokens.bytes(token) for token in prompt[len(prompt) - count:])
        return count

    def _last(self, prompt: list[int]) -> list[int]:
        """Up to `most` tokens at the end, all with a text; the first token of a prompt stays."""
        last: list[int] = []
        for token in reversed(prompt[1:]):
            if len(last) == self.most or token not in self._bytes:
                break
            last.insert(0, token)
        return last

    def prepare(self, lm) -> Iterator:
        if self._owed:
            yield Note(f"The end of the prompt, {shown(self._owed)}, is taken back and written again.")
        elif self.most:
            yield Note("Nothing is taken back: no token continues the end of this prompt, or a chat template ends it.")

    def apply(self, scores, histories):
        rows = [self._allowed(row, self._rest(history)) for row, history in zip(scores, histories)]
        return torch.stack(rows) if self._owed else scores

    def _allowed(self, row: torch.Tensor, rest: bytes) -> torch.Tensor:
        if not rest:
            return row
        ids = self.fitting(rest).to(row.device)
        left = torch.full_like(row, REMOVED).index_copy(0, ids, row[ids])
        return left if bool((left > REMOVED).any()) else row

    def _rest(self, history: list[int]) -> bytes:
        """What of the taken text is not written yet."""
        written = 0
        for token in history[self.start:]:
            written += len(self._bytes.get(token, b""))
            if written >= len(self._owed):
                break
        return self._owed[written:]

    def fitting(self, rest: bytes) -> torch.Tensor:
        """The tokens that continue a text towards `rest`, or beyond it, and do not end where no token goes on."""
        if rest not in self._fitting:
            found = [token for token, text in self._bytes.items() if text.startswith(rest) or self._leads(text, rest)]
            self._fitting[rest] = torch.tensor(found, dtype=torch.long)
        return self._fitting[rest]

    def _leads(self, text: bytes, rest: bytes) -> bool:
        """Whether a text begins `rest`, and tokens exist for what remains."""
        return rest.startswith(text) and len(self.fitting(rest[len(text):])) > 0

    def explain(self, scores, history, token) -> Iterator:
        if self._rest(history):
            place = len(history) - self.start
            yield Figure("spans", "written again", {"spans": [[place, place + 1, "end of the prompt", 1]]})


def covering(last: list[bytes], vocabulary: list[bytes]) -> int:
    """How many of the last tokens hold the longest end of a text with which a longer token begins; 0 for none.

    `last` are their bytes, `vocabulary` those of all tokens, sorted.
    """
    text = b"".join(last)
    start = next((start for start in range(len(text)) if begins_longer(text[start:], vocabulary)), len(text))
    count, covered = 0, 0
    while covered < len(text) - start:
        count += 1
        covered += len(last[-count])
    return count


def begins_longer(end: bytes, vocabulary: list[bytes]) -> bool:
    """Whether a token of a sorted vocabulary begins with `end` and goes on."""
    after = bisect_right(vocabulary, end)
    return after < len(vocabulary) and vocabulary[after].startswith(end)


def shown(text: bytes) -> str:
    return repr(text.decode(errors="replace"))
