"""Defaults of the speed benchmark, and the names of what it measures.

Imports neither torch nor transformers, so that options are parsed at once and a report needs no model.
"""
from __future__ import annotations

from dataclasses import dataclass

SHAPES = {"0.5b": "Qwen2.5 0.5B", "1.5b": "Qwen2.5 1.5B", "8b": "Llama 3.1 8B"}
PARTS = ("text", "blocks", "decoding", "first", "memory")
LIBRARY, STATIC, COMPILED, LOOP = (
    "generate",
    "generate, static cache",
    "generate, static cache, compiled",
    "hand-written loop",
)
LANE, SILENT_LANE, LIMIT = "lane", "lane, nothing recorded", "bandwidth limit"
FIRST, ENGINE, LIBRARY_PREFILL = "first token of a lane", "bare prefill, ours", "bare prefill, the library's"
FORMULA, HELD, ALLOCATED, DEVICE = "formula", "held", "allocated", "grown on the device"


def together(lanes: int) -> str:
    return f"{lanes} lanes together"


def apart(lanes: int) -> str:
    return f"{lanes} lanes one after the other"


def block(nodes: int) -> str:
    return f"{nodes} nodes" if nodes > 1 else "1 node"


@dataclass(frozen=True)
class Grid:
    """What to measure: contexts and block sizes in tokens, numbers of lanes, measured rounds (`repeats`), tokens per
    text (`length`), and whether the library's compiled `generate` runs.
    """

    contexts: tuple[int, ...] = (128, 2048, 16384)
    blocks: tuple[int, ...] = (1, 4, 16, 64)
    lanes: tuple[int, ...] = (1, 4)
    repeats: int = 5
    length: int = 64
    compiled: bool = True
