"""States of slots where the heads of a layer hold different numbers of tokens."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RaggedRows:
    """The oldest slots of a buffer without those that are empty, so that each head takes the memory it needs.

    Attention reads all heads in one product, for which they are spread out again, one layer at a time.
    """

    held: Tensor  # of all heads, one after the other, [tokens, d]
    counts: list[int]  # tokens of each head, which are its first slots

    @property
    def count(self) -> int:
        """Slots of the fullest head."""
        return max(self.counts)

    @property
    def bytes(self) -> int:
        return self.held.numel() * self.held.element_size()

    def unpack(self, room: int = 0) -> Tensor:
        """A new tensor [kv_heads, count + room, d], zero where a slot is empty.

        The last `room` slots are left for the caller.
        """
        rows = self.held.new_zeros(len(self.counts), self.count + room, self.held.shape[1])
        for head, own in zip(rows, self.held.split(self.counts)):
            head[:len(own)] = own
        return rows
