"""n-gram frequencies of a corpus, counted in the corpus itself on every lookup."""
from __future__ import annotations

import torch
from torch import Tensor

BREAK = -1  # separates texts, so that no context spans two of them


class Corpus:
    """Texts as token ids, and the length of the longest context, in tokens, that is looked up in them."""

    def __init__(self, texts: list[list[int]], longest: int):
        self.longest = longest
        self.lookups, self.hits = 0, [0] * longest  # contexts looked up; those whose last 1, 2, ... tokens occur
        self.ids = torch.tensor([BREAK] * longest + [token for text in texts for token in [*text, BREAK]])

    def followers(self, context: list[int]) -> list[Tensor]:
        """Tokens after each occurrence of the last 1, 2, ... tokens of a context; empty if that suffix never occurs."""
        places, found = torch.arange(self.longest, len(self.ids)), []
        self.lookups += 1
        for length in range(1, min(self.longest, len(context)) + 1):
            places = places[self.ids[places - length] == context[-length]]
            following = self.ids[places]
            found.append(following[following != BREAK])
            self.hits[length - 1] += len(found[-1]) > 0
        return found

    def hit_rates(self) -> list[float]:
        """Share of contexts whose last 1, 2, ... tokens occur with a token after them."""
        return [hits / max(1, self.lookups) for hits in self.hits]


def frequencies(followers: list[Tensor], weights: tuple[float, ...], size: int) -> Tensor:
    """Relative frequencies of the next token, [size], as a weighted sum over context lengths.

    A context that does not occur adds nothing.
    """
    total = torch.zeros(size, dtype=torch.float64)
    for following, weight in zip(followers, weights):
        if len(following):
            total += weight * torch.bincount(following, minlength=size)[:size] / len(following)
    return total
