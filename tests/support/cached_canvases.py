"""Canvases with a cache and without one."""
from __future__ import annotations

import torch

from support.canvases import LENGTH, PROMPT, denoiser, run

EXACT = 1e-5
WHOLE = len(PROMPT) + LENGTH
PLAIN = dict(cache="none", threshold=1.05, block_length=6)


def plain(model, **knobs):
    return run(model, "fast_dllm", **PLAIN | knobs)


# --- refreshed at every step ---

class EmbeddingsOnly:
    """Weights with which no position learns of another: attention adds nothing."""

    @staticmethod
    def of(shifted: bool = False):
        model = denoiser(shifted)
        for layer in model.network.model.layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        return model
