"""How fast a model decodes on this machine: measured when it has been loaded, and kept for the next start."""
from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.checkpoint.catalogue import made_models
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Commit
from playground.lane_fields import LaneConfig

PROMPT = Prompt("Once upon a time there was a small house by the sea, and in it lived")
TOKENS = 12
PATIENCE = 2.0  # seconds on the clock of the lane after which it is stopped
LEAST = 3  # intervals between tokens that make a measurement
MOST = 200  # models that are kept


class DecodeSpeeds:
    """Tokens a second of plain greedy lanes, by model, device, dtype and quantisation, in a file of the user's."""

    def __init__(self, file: Path | None = None):
        self._file = file or made_models().parent / "speeds.json"
        self._measured: dict[str, float] = {}

    def measure(self, model: Any) -> None:
        """Measure a model that has been loaded. One that fills masks, or ends its text at once, is left out."""
        if speed := tokens_per_second(model):
            dtype = str(model.dtype).removeprefix("torch.")
            self._measured[_key(model.name, model.device.type, dtype, model.quantization)] = speed
            self._write({**self._read(), **self._measured})

    def find(self, name: str, device: str, dtype: str, quantization: str) -> float | None:
        """What was measured of such a model, now or in an earlier process; None if nothing was."""
        key = _key(name, device.split(":")[0], dtype, quantization)
        return self._measured.get(key) or self._read().get(key)

    def _read(self) -> dict[str, float]:
        with suppress(OSError, ValueError, RecursionError):
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            if isinstance(stored, dict):
                return {name: speed for name, speed in stored.items() if type(speed) is float and 0 < speed < 1e6}
        return {}

    def _write(self, speeds: dict[str, float]) -> None:
        """Keep them; where nothing can be written, they last for this process."""
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(dict([*speeds.items()][-MOST:])), encoding="utf-8")
            partial.replace(self._file)


def tokens_per_second(model: Any) -> float | None:
    """Of a plain greedy lane, from the median interval between its tokens; None for a model that fills masks, one that
    cannot read the prompt, and one that ends its text at once.
    """
    if not isinstance(model, Model):
        return None
    with suppress(Refusal, RuntimeError):  # of a device without memory, which the first run reports
        clocks = []
        for stamped in prepare(Models(model), [LaneConfig("greedy")], PROMPT, Limits(max_new_tokens=TOKENS)):
            clocks += [stamped.at] if isinstance(stamped.event, Commit) else []
            if stamped.at > PATIENCE:
                break
        waits = [after - before for before, after in zip(clocks, clocks[1:])]
        return 1 / median(waits) if len(waits) >= LEAST and median(waits) > 0 else None
    return None


def _key(name: str, device: str, dtype: str, quantization: str) -> str:
    return f"{name} {device} {dtype} {quantization}"
