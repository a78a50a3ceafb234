"""DiffusionGemma: a canvas of noise that becomes text, block by block, instead of masks that are filled.

The library's network has two parts with the same weights. The encoder reads what is before a block with causal
attention and leaves key and value states. The decoder reads the tokens of a block, at first random ones, in both
directions, and predicts all of them; it also reads the logits of its own last forward (self-conditioning).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from playground.engine.canvas.canvas_pass import CanvasPass
from playground.engine.canvas.denoiser import CanvasNetwork
from playground.errors import Refusal


@dataclass
class NoiseStates:
    """What a canvas of noise keeps between forwards.

    cache: states of the tokens before the block, the first `encoded` of the text. conditioning: logits [block, V] of
    the last forward over this block that the next one reads; None in the first.
    """

    cache: DynamicCache
    encoded: int = 0
    conditioning: Tensor | None = field(default=None, repr=False)


class NoiseDenoiser(CanvasNetwork):
    """The library's DiffusionGemma network, in place of a Model for its canvas decoder."""

    attention = "noise"

    @property
    def canvas_length(self) -> int:
        """Positions in a block; the first begins after the prompt."""
        return self.network.config.canvas_length

    def answer_length(self, prompt: list[int], most: int) -> int:
        if not prompt:
            raise Refusal(f"{self.name} reads a text before it writes: write a prompt.", "prompt")
        return super().answer_length(prompt, most)

    def new_states(self, length: int) -> NoiseStates:
        """Empty states of a canvas."""
        return NoiseStates(DynamicCache(config=self.network.config.get_text_config(decoder=True)))

    @torch.inference_mode()
    def denoise(
        self,
        canvas: Sequence[int | None],
        wanted: Sequence[int] | None = None,
        computed: Sequence[int] | None = None,
        states: NoiseStates | None = None,
    ) -> Tensor:
        """Logits [len(wanted), V] in float32; `computed` is the block, every position of it has a token.

        wanted: positions to predict, the block by default. What is before the block is encoded once, so it must be
        final.
        """
        states = states or self.new_states(len(canvas))
        wanted = computed if wanted is None else wanted
        start = computed[0]
        with self.lock:
            if states.encoded < start:
                self.network.model.encoder(self._ids(canvas[states.encoded:start]), past_key_values=states.cache)
                states.encoded = start
            logits = self.network(
                decoder_input_ids=self._ids(canvas[start:start + len(computed)]), past_key_values=states.cache,
                self_conditioning_logits=None if states.conditioning is None else states.conditioning[None],
            ).logits[0]
        return logits[[position - start for position in wanted]].to(torch.promote_types(logits.dtype, torch.float32))

    def forward(self, passes: Sequence[CanvasPass], plan: Any = None) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Logits of several canvases, one after the other, as `denoise` gives them, and no captured states."""
        return [self.denoise(one.canvas, one.wanted, one.computed, one.states) for one in passes], {}

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.device)
