"""Cache policies that change how the prompt is read: in chunks, with a mask, by fewer layers, at other positions."""
from __future__ import annotations

from typing import TYPE_CHECKING

from playground.contract.cache_policy.base_policy import CachePolicy

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract.cache_policy.held import Held


class ReadsInChunks(CachePolicy, capability=True):
    """Acts after each chunk of the prompt, too, with the moment "chunk"."""

    @property
    def prefill_chunk(self) -> int:
        """Tokens of a chunk; 0 reads the prompt as a whole."""
        raise NotImplementedError

    def chunk_probe(self, text: list[int], read: int) -> list[int]:
        """Tokens to append and discard after `read` tokens of the prompt, before the policy acts."""
        return []


class RestrictsPrompt(CachePolicy, capability=True):
    """May apply `visible`, and the renumbering of positions, to the rows of the prompt, too."""

    @property
    def restricts_prompt(self) -> bool:
        """Whether it does."""
        raise NotImplementedError


class RenumbersPositions(CachePolicy, capability=True):
    """May let rows use their index in the cache as position: keys before a gap move towards the row by its width."""

    @property
    def renumbers_positions(self) -> bool:
        """Whether it does."""
        raise NotImplementedError

    def before_gap(self, key_positions: Tensor) -> Tensor:
        """Which true key positions [..., m] lie before the gap that positions leave open, bool."""
        raise NotImplementedError

    def gap_width(self, query_positions: Tensor) -> Tensor:
        """Width of the gap for rows at query positions [n], in positions, [n]."""
        raise NotImplementedError


class CutsPrompt(CachePolicy, capability=True):
    """Shortens the prompt for later layers."""

    def cut_layers(self, layers: int) -> list[int]:
        """Layers, ascending and never the first, that read only the prompt tokens `select_prompt` selects."""
        raise NotImplementedError

    def select_prompt(self, held: Held) -> Tensor:
        """Which prompt tokens continue past a cut, bool [1, slots], given the layer before it.

        The last prompt token always continues.
        """
        raise NotImplementedError
