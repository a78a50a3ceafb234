"""The demonstration lane of every strategy on the CPU and on the GPU, in float32: JSON lines that say whether both
wrote the same text.
"""
from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import playground
from playground.contract import discover
from playground.contract.lane_config import LaneConfig
from playground.decoding.models import Models
from playground.errors import Refusal

TOKENS = 24


def settings() -> dict[str, dict[str, Any] | None]:
    """By strategy; None for those that no lane can hold."""
    from playground.ui.library.demo_lanes import settings_for  # imports gradio

    found = {name: settings_for(cls) for name, cls in sorted(discover().items())}
    return {name: own and asdict(own) for name, own in found.items()}


@cache
def models_on(device: str, name: str, draft: str | None) -> Models:
    return playground.load(name or None, draft=draft, device=device, dtype="float32")


def written(own: dict[str, Any], device: str) -> tuple[str, str, float]:
    """Text, reason of the end, and seconds."""
    model, draft = own["model"], own["draft"]
    models = models_on(device, "" if model == "default" else model, None if draft in ("", "default") else draft)
    lane = own["lanes"][-1]
    config = LaneConfig(lane["strategy"], dict(lane.get("knobs") or {}),
                        [(name, dict(knobs)) for name, knobs in lane.get("extras") or []])
    start = perf_counter()
    (result,) = playground.compare(
        [config], own["prompt"], models=models, chat=own["mode"] == "chat", context=own["context"], seed=1,
        max_new_tokens=TOKENS, before=[tuple(turn) for turn in own["before"]], form=own["form"], tools=own["tools"],
    )
    return result.text, result.reason, perf_counter() - start


def compared(name: str, own: dict[str, Any] | None) -> dict[str, Any]:
    if own is None:
        return {"strategy": name, "state": "no lane"}
    try:
        cpu, gpu = (written(own, device) for device in ("cpu", "cuda"))
    except Refusal as refusal:
        return {"strategy": name, "state": "refused", "why": str(refusal)}
    except Exception as error:  # the table says which strategies fail
        return {"strategy": name, "state": "failed", "why": repr(error)[:300]}
    state = "failed" if gpu[1] == "failed" else "same" if cpu[:2] == gpu[:2] else "differs"
    return {"strategy": name, "state": state, "seconds": [round(cpu[2], 3), round(gpu[2], 3)],
            **({} if state == "same" else {"cpu": cpu[0][:300], "gpu": gpu[0][:300]})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="only write the lanes to this file")
    parser.add_argument("--lanes", type=Path, help="a file that --write made")
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1), help="every n-th strategy, from this one on")
    options = parser.parse_args()
    lanes = json.loads(options.lanes.read_text()) if options.lanes else settings()
    if options.write:
        options.write.write_text(json.dumps(lanes))
        return
    first, every = options.shard
    for name in sorted(lanes)[first::every]:
        print(json.dumps(compared(name, lanes[name])), flush=True)


if __name__ == "__main__":
    main()
