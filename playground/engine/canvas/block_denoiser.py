"""Denoisers that do not see the whole canvas: block by block, or what is known first.

Both are masked diffusion models whose finished positions keep their key and value states for good, since nothing that
is filled later changes what they see.
"""
from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from playground.engine.canvas.denoiser import MaskedDenoiser
from playground.engine.canvas.masked_models import masking_of


class BlockDenoiser(MaskedDenoiser):
    """Block diffusion: a position sees its own block, in both directions, and all earlier blocks.

    Blocks have `block_length` positions and are counted from the start of the text, prompt included. Blocks of one
    position make the network causal. BD3-LM: Arriola et al. 2025, arXiv 2503.09573.
    """

    attention = "block"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.block_length = masking_of(self.network.config).block_length

    def in_blocks(self, length: int) -> BlockDenoiser:
        """The same network with blocks of another length."""
        other = copy(self)
        other.block_length = length
        return other

    def ranks(self, canvas: Sequence[int | None]) -> Tensor:
        return torch.arange(len(canvas), device=self.device) // self.block_length


class KnownFirstDenoiser(MaskedDenoiser):
    """WeDLM: causal attention over the known tokens and then the masked ones, each in their order in the text.

    Known tokens see earlier known ones only, as in an autoregressive model; a masked position sees all known tokens and
    the masked positions before it. Liu et al. 2025, arXiv 2512.22737.
    """

    attention = "known_first"

    def ranks(self, canvas: Sequence[int | None]) -> Tensor:
        masked = torch.tensor([token is None for token in canvas], device=self.device)
        return torch.arange(len(canvas), device=self.device) + len(canvas) * masked
