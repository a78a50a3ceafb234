"""Cache policies that evict nothing, but select what each row attends to."""
from __future__ import annotations

from typing import TYPE_CHECKING

from playground.contract.cache_policy.base_policy import CachePolicy

if TYPE_CHECKING:
    from torch import Tensor

    from playground.engine.attention.attention_mask import RowsAndSlots
    from playground.engine.attention.line_attention import AttentionLines


class SelectsPerRow(CachePolicy, capability=True):
    """Selects what each row sees by its own attention weights."""

    def visible(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Everything before a row, of which it selects."""
        return query_positions >= key_positions

    def selects_for(self, position: int, prompt: int) -> bool:
        """Whether `select_for_rows` selects what the row at `position` sees; any other row sees every slot."""
        return position >= prompt

    def select_for_rows(self, layer: int, weights: Tensor, query_positions: Tensor) -> Tensor:
        """What the rows at query positions [n] see, bool [kv_heads, n, m].

        `weights` [kv_heads, n, m] are their attention weights, summed over the query heads of a group.
        """
        raise NotImplementedError


class SelectsLines(SelectsPerRow, capability=True):
    """Selects columns and diagonals of the attention matrix for the rows of the prompt that are read together.

    Some of the rows decide by their attention to all tokens; of the others, only the cells on these lines are computed.
    """

    def sampled_rows(self, rows: int) -> list[int]:
        """Which of so many rows decide, ascending."""
        raise NotImplementedError

    def select_lines(
        self, layer: int, weights: Tensor, sampled: list[int], query_positions: Tensor
    ) -> AttentionLines:
        """The lines for rows at query positions [n], by the attention weights [kv_heads, q, m] of the sampled ones."""
        raise NotImplementedError


class SelectsByStates(SelectsPerRow, capability=True):
    """Selects what each row sees before its attention is computed, by query and key states."""

    def select_by_states(self, layer: int, query_states: Tensor, key_states: Tensor, around: RowsAndSlots) -> Tensor:
        """What rows see, bool [kv_heads, n, m], by query [kv_heads, group, n, d] and key states [kv_heads, m, d]."""
        raise NotImplementedError
