"""Tokens a second in which the pocket models are trained, eager and compiled, as JSON lines.

    PYTHONPATH=. python tests/gpu/training.py              # every loss
    PYTHONPATH=. python tests/gpu/training.py --eager      # without compiling
"""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch

from playground.pocket import architecture
from playground.pocket.data import FULL, NOTHING, Windows
from playground.pocket.training.block_loss import block_loss
from playground.pocket.training.masked_loss import masked_loss
from playground.pocket.training.train import Trainer, TrainingPlan, target_loss

LOSSES = {"target": target_loss, "diffusion": masked_loss, "block-diffusion": block_loss}
WIDTH, TEXT, ASKED, VOCABULARY = 256, 64, 24, 4096
STEPS, ROUNDS, WARM_UP = 5, 3, 3


def windows(count: int) -> Windows:
    """Windows of texts of equal length, each a question and an answer, of random tokens."""
    place = np.arange(WIDTH + 1)
    ids = np.random.default_rng(0).integers(10, VOCABULARY, (count, len(place))).astype(np.uint16)
    weights = np.where(place % TEXT < ASKED, NOTHING, FULL).astype(np.uint8)
    texts = np.minimum(1 + place // TEXT, WIDTH // TEXT).astype(np.uint8)  # the window has one token more
    return Windows(ids, *(np.broadcast_to(part, ids.shape).copy() for part in (weights, texts)))


def trainer(folder: Path, loss: str, tokens: int, compiled: bool) -> Trainer:
    """A trainer of a new model of the bundled target's shape."""
    model = architecture.for_training(architecture.make("target", VOCABULARY).cuda())
    if compiled:
        architecture.compile_layers(model)
    plan = TrainingPlan(steps=10_000, tokens=tokens, stages={WIDTH: 1.0})
    return Trainer(model, LOSSES[loss], plan, (folder, folder))


def seconds_per_step(trainer: Trainer) -> Iterator[float]:
    for _ in range(WARM_UP):
        trainer.step()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(STEPS):
            trainer.step()
        torch.cuda.synchronize()
        yield (perf_counter() - start) / STEPS


def main() -> None:
    with TemporaryDirectory() as folder:
        windows(512).save(Path(folder) / f"train_{WIDTH}.npz")
        for compiled, tokens, loss in product((False, True)[:1 + ("--eager" not in sys.argv)], (65536, 8192), LOSSES):
            begun = trainer(Path(folder), loss, tokens, compiled)
            speeds = [round(tokens / taken) for taken in seconds_per_step(begun)]
            print(json.dumps(dict(training=loss, compiled=compiled, tokens=tokens, per_second=median(speeds),
                                  lowest=min(speeds), highest=max(speeds))), flush=True)


if __name__ == "__main__":
    main()
