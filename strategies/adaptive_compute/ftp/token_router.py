"""Which tokens of a prompt a block runs: features, the router's network, and the ranking without training."""
from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

FEATURES, HIDDEN = 4, 64


class TokenRouter(nn.Sequential):
    """Logit that a block needs a token, [..., n], from features [..., n, 4]; one network for all blocks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given)[..., 0]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> TokenRouter:
        """The router in what `fit` stored."""
        router = cls()
        named = {name.removeprefix("router."): weight.float() for name, weight in weights.items() if "router." in name}
        router.load_state_dict(named)
        return router.eval()


def features(received: Tensor, share: float) -> Tensor:
    """What the router reads of the tokens of a prompt, [n, 4], from the attention they received, [n].

    Place in the prompt; attention, relative to its mean; rank by attention, 1 for the most; share of skipped tokens.
    """
    count = len(received)
    place = torch.arange(count) / max(1, count - 1)
    relative = received / received.mean().clamp(min=1e-9)
    rank = received.argsort().argsort() / max(1, count - 1)
    return torch.stack([place, relative.clamp(max=10), rank, torch.full((count,), share)], 1)


def static_ranking(received: Tensor, recent: int) -> Tensor:
    """Scores [n] by the attention received; those of the first token and of the last `recent` are infinite."""
    scores = received.clone()
    scores[0] = scores[max(0, len(scores) - recent):] = math.inf
    return scores


def kept_tokens(scores: Tensor, share: float) -> Tensor:
    """The tokens that run, bool [n]: all but this share of them, those with the highest scores; earlier ones at a tie.

    Tokens with an infinite score always run.
    """
    count = round((1 - share) * len(scores))
    kept = torch.zeros(len(scores), dtype=torch.bool)
    kept[scores.argsort(descending=True, stable=True)[:count]] = True
    return kept | scores.isinf()
