"""What followed what in a corpus: n-gram frequencies, found in the corpus itself when they are asked for."""
from __future__ import annotations

import torch
from torch import Tensor

BREAK = -1  # stands between texts, so that no context reaches from one into another


class Corpus:
    """Texts as token ids, and the longest context, in tokens, that is looked up in them."""

    def __init__(self, texts: list[list[int]], longest: int):
        self.longest = longest
        self.asked, self.hits = 0, [0] * longest  # contexts looked up, and those whose last 1, 2, ... tokens occur
        self.ids = torch.tensor([BREAK] * longest + [token for text in texts for token in [*text, BREAK]])

    def followers(self, context: list[int]) -> list[Tensor]:
        """The tokens that follow each occurrence of the last 1, 2, ... tokens of a context, empty where that ending
        does not occur.
        """
        places, found = torch.arange(self.longest, len(self.ids)), []
        self.asked += 1
        for length in range(1, min(self.longest, len(context)) + 1):
            places = places[self.ids[places - length] == context[-length]]
            following = self.ids[places]
            found.append(following[following != BREAK])
            self.hits[length - 1] += len(found[-1]) > 0
        return found

    def hit_rates(self) -> list[float]:
        """Share of contexts whose last 1, 2, ... tokens occur with something after them."""
        return [hits / max(1, self.asked) for hits in self.hits]


def frequencies(followers: list[Tensor], weights: tuple[float, ...], size: int) -> Tensor:
    """Weighted sum, over the lengths of context, of how often each token followed, [size]; a context that does not
    occur adds nothing.
    """
    total = torch.zeros(size, dtype=torch.float64)
    for following, weight in zip(followers, weights):
        if len(following):
            total += weight * torch.bincount(following, minlength=size)[:size] / len(following)
    return total
