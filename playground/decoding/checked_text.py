"""The state of a text under a black-box checker, in place of a matcher.

Any decoder can use its masks, each of which takes one call of the checker per token of the vocabulary. Decoders that
check single tokens, such as adaptive weighted rejection sampling, make few calls.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from playground.contract.constraint import Checker


class CheckedText:
    """State of one text under a black-box checker, which is called once per token and position.

    `spelling` is the function from token id to bytes, `ends` are the tokens that end a text.
    """

    def __init__(self, checker: Checker, spelling: Callable[[int], bytes], vocabulary: int, ends: frozenset[int]):
        self.checker, self.spelling, self.vocabulary, self.ends = checker, spelling, vocabulary, ends
        self._texts = [b""]  # after each token, the first before all
        self._ended = False
        self._known: dict[int, bool] = {}

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        if token not in self._known:
            self._known[token] = self._is_allowed(token)
        return self._known[token]

    def mask(self) -> Tensor:
        """Tokens that may come next, bool [V]."""
        return torch.tensor([self.allows(token) for token in range(self.vocabulary)])

    def masks_of_tree(self, tokens: list[int], parents: list[int]) -> Tensor:
        """Masks after the text so far and after each node of a draft tree, bool [1 + N, V]."""
        places: list[CheckedText | None] = [self]
        for token, parent in zip(tokens, parents):
            before = places[1 + parent]
            place = before.fork() if before else None
            places.append(place if place and place.advance(token) else None)
        nothing = torch.zeros(self.vocabulary, dtype=torch.bool)
        return torch.stack([place.mask() if place else nothing for place in places])

    def advance(self, token: int) -> bool:
        """Advance over one token; False, without a change, if it is not allowed."""
        if not self.allows(token):
            return False
        self._texts.append(self._texts[-1] + self.spelling(token))
        self._ended, self._known = token in self.ends, {}
        return True

    def rollback(self, count: int) -> None:
        """Roll back the last `count` tokens; raises ValueError if there are fewer."""
        if not 0 <= count < len(self._texts):
            raise ValueError(f"cannot take back {count} of {len(self._texts) - 1} tokens")
        if count:
            del self._texts[-count:]
            self._ended, self._known = False, {}

    def forced(self) -> list[int]:
        """Always empty: finding the only allowed token would take one call per token of the vocabulary."""
        return []

    def fork(self) -> CheckedText:
        """An independent copy of this text."""
        twin = CheckedText(self.checker, self.spelling, self.vocabulary, self.ends)
        twin._texts, twin._ended, twin._known = self._texts.copy(), self._ended, self._known.copy()
        return twin

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return self._ended or self.checker.complete(self._texts[-1])

    @property
    def stopped(self) -> bool:
        """Whether only the end can follow, as far as is known without calling the checker."""
        return self._ended

    @property
    def state(self) -> str:
        return "ended" if self._ended else "open"

    def _is_allowed(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self.ends:
            return self.checker.complete(self._texts[-1])
        spelled = self.spelling(token)
        return bool(spelled) and self.checker.viable(self._texts[-1] + spelled)
