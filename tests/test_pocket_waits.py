"""A training step of a pocket model on a GPU: what it computes is launched without reading anything back."""
from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from playground.pocket import architecture, data
from playground.pocket.data import FULL, NOTHING, Windows
from playground.pocket.training.block_loss import block_loss
from playground.pocket.training.masked_loss import masked_loss
from playground.pocket.training.train import NOTED, Trainer, TrainingPlan, data_loss, target_loss
from support.gpu_standin import Standin

WIDTH = 48


@pytest.fixture
def windows() -> Windows:
    """Three windows of four texts, each a question of four tokens and an answer of eight."""
    places = np.arange(WIDTH)
    parts = np.where(places % 12 < 4, NOTHING, FULL), 1 + places // 12
    ids = np.random.default_rng(0).integers(10, 600, (3, WIDTH)).astype(np.uint16)
    return Windows(ids, *(np.tile(part.astype(np.uint8), (3, 1)) for part in parts))


@pytest.mark.parametrize("loss", [target_loss, data_loss, masked_loss, block_loss])
def test_a_loss_waits_for_nothing_and_is_the_cpus(windows, loss, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)  # the stand-in has no properties
    model, trainer = architecture.make("nano", 600), SimpleNamespace(rng=lambda: random.Random(1))
    model.set_attn_implementation("sdpa")
    model.config.use_cache = False
    with torch.no_grad():
        wanted = float(loss(model, windows.tensors(), trainer))
        with Standin() as machine:
            found = loss(machine.move(model), windows.tensors(machine.device), trainer)
            assert not machine.waits
    assert float(found.held) == pytest.approx(wanted, abs=0.02)  # products are in bfloat16 there


class Unread:
    """A loss of 1 that counts how often the host reads it."""

    reads = 0

    def detach(self) -> Unread:
        return self

    def backward(self) -> None: ...

    def __add__(self, other: object) -> Unread:
        return self

    __radd__ = __add__

    def __truediv__(self, other: int) -> Unread:
        return self

    def __float__(self) -> float:
        Unread.reads += 1
        return 1.0


def test_the_loss_of_the_steps_is_read_once_for_a_point_of_the_curve(windows, tmp_path):
    windows.save(tmp_path / f"train_{WIDTH}.npz")
    plan = TrainingPlan(steps=100, tokens=WIDTH, stages={WIDTH: 1.0})
    trainer = Trainer(architecture.make("nano", 600), lambda *_: Unread(), plan, (tmp_path, tmp_path))
    for _ in range(2 * NOTED):
        trainer.step()
    assert Unread.reads == 2 and [loss for _, loss in trainer.state.losses] == [1.0, 1.0]


def texts(rng: random.Random) -> Callable[[], tuple[list[int], list[int]]]:
    """Texts of one repeated token, each with its weights."""
    def text() -> tuple[list[int], list[int]]:
        length = rng.randint(3, 30)
        return [rng.randrange(10, 600)] * length, [FULL] * length

    return text


@pytest.mark.slow
def test_windows_packed_by_several_processes_are_those_of_one_and_none_comes_twice(monkeypatch):
    monkeypatch.setattr(data, "PIECE", 5 * 255)  # two pieces

    def packed(cores: int) -> Windows:
        monkeypatch.setattr(data.os, "cpu_count", lambda: cores)
        return data.packed(texts, 3, 255, 10)

    one, two = packed(1), packed(2)
    assert len(one.ids) == 10 and (one.ids == two.ids).all() and (one.weights == two.weights).all()
    assert all((former != later).any() for former, later in pairwise(one.ids))
