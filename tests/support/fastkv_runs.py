"""Runs under FastKV."""
from __future__ import annotations

BY_HAND = ("llama", "qwen3", "gpt_neox", "gpt2")
WINDOW, CAPACITY, KERNEL = 3, 8, 3


# the first of three layers reads everything
KNOBS = dict(window=WINDOW, capacity=CAPACITY, kernel=KERNEL, rate=0.5, depth=0.35)
