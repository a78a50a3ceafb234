"""Makes tests/kvpress_reference.json: scores of NVIDIA's kvpress for random keys and values.

    python tests/support/kvpress_scores.py FOLDER

FOLDER holds a checkout of NVIDIA/kvpress, which is used here only, never by the playground. Keys and values are
computed from their names, so that a test makes the same.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

try:  # as a script of another environment, or as a module of the tests
    from public_denoisers import _rounded, _weight
except ModuleNotFoundError:
    from support.public_denoisers import _rounded, _weight

OUT = Path(__file__).parents[1] / "kvpress_reference.json"
HEADS, TOKENS, WIDTH = 3, 37, 8
CUR = {"keys": "key", "values": "value", "mean": "kv_avg", "product": "kv_product"}  # theirs, by ours
WINDOWS = (5, 16, 0)  # 0: none


def states(part: str) -> torch.Tensor:
    """Keys or values [heads, tokens, width], of very different lengths."""
    return _weight(part, [HEADS, TOKENS, WIDTH]) * (1 + 20 * _weight(f"{part} lengths", [HEADS, TOKENS, 1]).abs())


def cur(leverage: str, window: int) -> list[list[float]]:
    from kvpress.presses.cur_press import CURPress
    press = CURPress(
        leverage_type=CUR[leverage], use_local_approximation=window > 0, local_window_size=window or 1, num_sinks=4
    )
    scores = press.score(None, None, states("keys")[None], states("values")[None], None, {})[0]
    return _rounded(scores * 1000)  # so that six decimals tell them apart


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    found = {"cur": {f"{leverage} {window}": cur(leverage, window) for leverage in CUR for window in WINDOWS}}
    OUT.write_text(json.dumps(found) + "\n")
