"""Self-attention of a drafter whose memory does not grow: the last tokens of the text, then a draft tree.

The attention over the tokens of the text needs no mask, the one over the tree does; both are merged exactly through
their log-sum-exp. Yang et al. 2025, arXiv 2502.17421.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from playground.algorithms.draft_heads.head_layers import Place
from playground.engine.attention.attention_mask import as_bias
from playground.engine.attention.cascade_attention import attend_part, merge
from playground.engine.host_copies import moved

Project = Callable[[list[int], Tensor], tuple[Tensor, Tensor]]
"""Key and value states [kv_heads, n, d] of tokens at positions [n]."""


class WindowCache:
    """Key and value states of the last `size` tokens of a text."""

    def __init__(self, size: int):
        self.size, self.tokens, self.start = size, [], 0  # the tokens held, and the position of the first
        self.keys = self.values = torch.empty(0)  # [kv_heads, tokens, d]

    def follow(self, text: list[int], project: Project, device: torch.device) -> None:
        """Hold the last tokens of a text; only those that are new to the window are projected."""
        end, start = self.start + len(self.tokens), max(0, len(text) - self.size)
        stale = not self.tokens or end < start or self.tokens != text[self.start:end]
        if stale:
            end = start
        if end < len(text):
            keys, values = project(text[end:], torch.arange(end, len(text), device=device))
            old = [] if stale else [(self.keys, self.values)]
            self.keys, self.values = (torch.cat(part, 1)[:, -self.size:] for part in zip(*old, (keys, values)))
        self.tokens, self.start = text[start:], start


class TreeRows(Place):
    """New rows of a draft tree after a window: each sees the whole window and its own ancestors in the tree."""

    def __init__(self, window: WindowCache):
        self.window, self.positions = window, torch.empty(0)
        self._keys = self._values = None  # of the tree so far, [kv_heads, nodes, d]
        self._seen = torch.empty(0)  # bool [rows, nodes], the new rows included

    @property
    def nodes(self) -> int:
        """Rows of the tree so far."""
        return 0 if self._keys is None else self._keys.shape[1]

    def place(self, positions: Tensor, seen: Tensor) -> None:
        """Where the next rows stand, and which rows of the tree each sees, itself included: bool [rows, nodes]."""
        self.positions, self._seen = positions, moved(seen, positions.device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self._keys is not None:
            keys, values = torch.cat([self._keys, keys], 1), torch.cat([self._values, values], 1)
        self._keys, self._values = keys, values
        scale, groups = query.shape[-1] ** -0.5, query.shape[0] // len(keys)
        text = attend_part(query, self.window.keys, self.window.values, None, scale)
        return merge(text, attend_part(query, keys, values, as_bias(self._seen, groups, query.dtype), scale))


class LastToken(Place):
    """The last token of a window, whose states the window holds already."""

    def __init__(self, window: WindowCache):
        self.window = window
        self.positions = torch.full((1,), window.start + len(window.tokens) - 1, device=window.keys.device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend_part(query, self.window.keys, self.window.values, None, query.shape[-1] ** -0.5).out


class WindowedTexts(Place):
    """Rows that are whole texts at some positions [rows], during a training: each sees the last `size` before it."""

    def __init__(self, positions: Tensor, size: int):
        self.positions = positions
        distance = torch.arange(len(positions))[:, None] - torch.arange(len(positions))
        self._seen = (distance >= 0) & (distance < size)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, self._seen, enable_gqa=True)
