"""Hyperfitting against a figure computed by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from toys import network
from transformers import PreTrainedModel

from playground.contract import Strategy, find
from playground.events import Figure
from support.wrong_variants import refused

Hyperfitting = find("hyperfitting")


def windows() -> list[list[int]]:
    return torch.randint(3, 320, (5, 24), generator=torch.Generator().manual_seed(0)).tolist()


def adam(model: PreTrainedModel, ids: torch.Tensor, steps: int, lr: float) -> list[float]:
    """Adam as published, on the library's own loss of all windows; returns the loss before each step."""
    weights = list(model.parameters())
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    losses = []
    for step in range(1, steps + 1):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        losses.append(loss.item())
        for w, m, v, g in zip(weights, first, second, torch.autograd.grad(loss, weights)):
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            corrected = (v / (1 - 0.999**step)).sqrt() + 1e-8
            w.data -= lr * (m / (1 - 0.9**step)) / corrected
    return losses


def check_hyperfitting(cls: type[Strategy]) -> None:
    """Weights, training loss and held-out loss are those of Adam on all windows but the last, without dropout."""
    trained, expected = network("gpt2").double().train(), network("gpt2").double().eval()
    method = cls(sequences=9, length=24, epochs=3, lr=1e-3, batch=4, enough=0.0, every=60, held_out=1)
    recorded = list(method.make(trained, windows(), seed=0))
    losses = adam(expected, torch.tensor(windows()[:4]), 3, 1e-3)
    figures = [event.data["series"] for event in recorded if isinstance(event, Figure)]
    assert [series["training loss"] for series in figures[1:]] == pytest.approx(losses, rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(trained.parameters(), expected.parameters()))
    rest = torch.tensor(windows()[4:])
    assert figures[-1]["held-out loss"] == pytest.approx(expected(input_ids=rest, labels=rest).loss.item(), rel=1e-6)


class TrainsOnAllWindows(Hyperfitting):
    def _split(self, windows, seed):
        _, held_out = super()._split(windows, seed)
        return windows, held_out


class HoldsTheFirstOut(Hyperfitting):
    def _split(self, windows, seed):
        return super()._split(windows.flip(0), seed)


class WithDropout(Hyperfitting):
    def _epochs(self, network, windows, seed):
        network.train()
        return super()._epochs(network, windows, seed)


class DecaysTheRate(Hyperfitting):
    def _epochs(self, network, windows, seed):
        for epoch in range(self.epochs):
            once = type(self)(self.sequences, self.length, 1, self.lr / (epoch + 1), self.batch)
            yield from Hyperfitting._epochs(once, network, windows, seed)


@pytest.mark.oracle("hyperfitting")
def test_hyperfitting_trains_as_adam_does():
    check_hyperfitting(Hyperfitting)


@pytest.mark.refuses("hyperfitting")
@pytest.mark.parametrize("wrong", [TrainsOnAllWindows, HoldsTheFirstOut, WithDropout, DecaysTheRate])
def test_a_wrong_hyperfitting_is_refused(wrong):
    refused(check_hyperfitting, wrong)
