"""Cache policies whose copies decide for several texts at once."""
from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from playground.contract.cache_policy.base_policy import CachePolicy

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor


class DecidesByHead(CachePolicy, capability=True):
    """Decides for every KV head without regard to those of other texts.

    So one call acts on several texts, whose caches are handed over as further heads of one layer, text by text. Only a
    policy that compares the heads of a layer after the prompt, or sums over them, has to keep the texts apart.
    """

    def for_heads(self, layer: int, heads: Tensor) -> Self:
        """A copy for a cache of one layer whose heads are copies of these heads [n] of its own.

        Override it to select what is held by head; all else is shared.
        """
        return copy(self)
