"""Makes tests/turboquant_reference.json: centroids of vLLM's turboquant cache types.

    python tests/support/turboquant_centroids.py FOLDER

FOLDER holds a checkout of vllm-project/vllm, of which one file is used here only, never by the playground.
"""
from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

OUT = Path(__file__).parents[1] / "turboquant_reference.json"
PLACE = "vllm/model_executor/layers/quantization/turboquant/centroids.py"
SIZES = [(8, 3), (32, 3), (32, 4), (64, 3), (64, 4), (128, 3), (128, 4)]  # channels and bits

if __name__ == "__main__":
    solve = runpy.run_path(str(Path(sys.argv[1]) / PLACE))["solve_lloyd_max"]
    found = {f"{d} {bits}": solve(d, bits)[0].tolist() for d, bits in SIZES}
    OUT.write_text(json.dumps(found) + "\n", encoding="utf-8")
