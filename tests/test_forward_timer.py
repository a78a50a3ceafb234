"""The time of a forward, and numbers between host and device."""
from __future__ import annotations

import torch

from playground.engine.forward_timer import ForwardTimer
from playground.engine.host_copies import moved, on_device, read_lists, read_together
from support.gpu_standin import DeviceTensor, Standin

CUDA = torch.device("cuda", 0)


def test_a_forward_that_was_read_is_timed_without_another_wait():
    with Standin() as machine:
        timer = ForwardTimer(CUDA)
        logits = DeviceTensor(torch.ones(3), machine) + 1
        timer.stop()
        logits.tolist()
        before = machine.waits.total()
        assert timer.seconds() > 0 and machine.waits.total() == before


def test_a_forward_that_was_not_read_is_waited_for_once():
    with Standin() as machine:
        timer = ForwardTimer(CUDA)
        DeviceTensor(torch.ones(3), machine).sum()
        timer.stop()
        timer.wait()
        assert timer.seconds() > 0 and machine.waits == {"event": 1}


def test_on_the_host_the_seconds_end_when_it_is_stopped():
    timer = ForwardTimer(torch.device("cpu"))
    torch.matmul(torch.ones(64, 64), torch.ones(64, 64))
    timer.stop()
    timer.wait()
    assert timer.seconds() == timer.host > 0


def test_numbers_reach_a_device_without_a_wait_and_return_in_one_transfer():
    with Standin() as machine:
        ids, mask = on_device([[3, 1]], CUDA), moved(torch.tensor([[True, False]]), CUDA)
        assert not machine.waits
        assert read_together(ids.double(), mask) == [[[3.0, 1.0], [1.0, 0.0]]]
        assert machine.waits == {"read": 1}


def test_lists_of_all_types_and_shapes_are_read_in_one_transfer():
    parts = [torch.tensor([0.1, 0.2]), torch.tensor([[3], [2 ** 24 - 1]]), torch.tensor(True)]
    for kind in ("cuda", "mps"):
        with Standin(kind) as machine:
            assert read_lists(*(DeviceTensor(part, machine) for part in parts)) == [part.tolist() for part in parts]
            assert machine.waits.total() == 1
    assert read_lists(*parts) == [part.tolist() for part in parts]
