"""What a cache policy is given: the slots of a layer, and the size of a full cache."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from playground.engine.attention.attention_mask import EMPTY

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Held:
    """The KV slots of one layer, of which a policy selects the live ones. A slot whose position is EMPTY holds no
    token.
    """

    layer: int
    layers: int
    # "prefill": the prompt was read; "keep": tokens were committed; "branch": by parallel sequences; "chunk": a part of
    # the prompt was read, by a policy that derives from `ReadsInChunks`
    moment: str
    prompt: int  # tokens of the prompt
    next: int  # position of the next row
    positions: Tensor  # true positions, [kv_heads, slots]; [1, slots] if all heads agree
    read: Callable[[str], Tensor]  # "keys" or "values" of the slots, [kv_heads, slots, head_dim]
    write: Callable[[str, Tensor], None] | None = None  # overwrites "keys" or "values", shaped as they are read

    @cached_property
    def live(self) -> Tensor:
        """Slots that hold a token, bool [1 or kv_heads, slots]."""
        return self.positions != EMPTY


@dataclass(frozen=True)
class Full:
    """The size of the cache without any policy."""

    prompt: int  # tokens
    generated: int  # tokens after the prompt
    layers: int
    heads: int  # KV heads
    head: int  # head_dim
    bits: int  # per number

    @property
    def length(self) -> int:
        return self.prompt + self.generated
