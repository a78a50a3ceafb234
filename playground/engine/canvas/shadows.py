"""What the shadows of a canvas see: masks beside it that predict a filled position from all the others.

The mask of a shadow sees every position except its own, and the other masks; no position sees a shadow (WINO, arXiv
2507.18578). A shifted model predicts a token at the position before it. There a copy of that token predicts the shadow:
it sees itself in place of the position that it copies, its own mask in place of the shadowed position, and all others,
and a mask sees no other mask. With one layer this is exactly a forward in which that position alone is masked; in
deeper networks the other positions have read the token.
"""
from __future__ import annotations

import torch
from torch import Tensor

from playground.engine.canvas.canvas_pass import CanvasPass


def visible(one: CanvasPass, device: torch.device) -> Tensor:
    """Which entries each entry sees, as far as shadows decide it: bool [entries, entries]."""
    size, count = len(one.canvas), len(one.shadows)
    allowed = torch.zeros(len(one.entries), len(one.entries), dtype=torch.bool, device=device)
    allowed[:, :size] = True
    masks = torch.arange(size, size + count, device=device)
    shadowed = torch.tensor(one.shadows, dtype=torch.long, device=device)
    allowed[masks, shadowed] = False
    if not one.copied:
        allowed[size:, size:] = True
        return allowed
    copies = masks + count
    allowed[copies, shadowed] = allowed[copies, shadowed - 1] = False
    allowed[masks, masks] = allowed[copies, copies] = allowed[copies, masks] = True
    return allowed
