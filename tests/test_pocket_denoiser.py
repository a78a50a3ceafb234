"""Training the masked denoiser: masks, loss, windows with canvases, and a model that loads; seconds, on nano models."""
from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pocket_windows import tokenizer  # noqa: F401

from playground.pocket import canvas_windows, masked_loss
from playground.pocket import tokenizer as tokens
from playground.pocket.data import Batch, Windows
from playground.pocket.model_roles import DENOISER, EVERY, ROLES
from playground.pocket.world import TASKS

pytestmark = pytest.mark.bench
END = tokens.SPECIALS.index(tokens.END)


class Scripted(torch.nn.Module):
    """A network whose logits for a token depend on how many of the tokens it sees are masked."""

    def __init__(self, vocabulary: int = 8):
        super().__init__()
        torch.manual_seed(1)
        self.rows = torch.nn.Parameter(torch.randn(20, vocabulary) * torch.arange(20)[:, None] / 2)

    def model(self, ids, attention_mask):
        masked = (ids == masked_loss.MASK).sum(-1, keepdim=True).expand_as(ids)
        return SimpleNamespace(last_hidden_state=self.rows[masked])

    def lm_head(self, states):
        return states


def batch(ids: list[int], asked: int) -> Batch:
    row = torch.tensor([ids])
    weights = torch.tensor([[0.0] * asked + [1.0] * (len(ids) - asked)])
    return Batch(row, weights, torch.ones_like(row))


def exact_bound(network: Scripted, ids: list[int], asked: int) -> float:
    """E over l and sets of l of (L / l) * sum of -log p, per token: by enumeration."""
    length, total = len(ids) - asked, 0.0
    for count in range(1, length + 1):
        nats = -network.rows[count].detach().log_softmax(-1)
        sets = list(itertools.combinations(range(asked, len(ids)), count))
        total += sum(sum(float(nats[ids[i]]) for i in chosen) for chosen in sets) / len(sets) * (length / count)
    return float(total / length / length)


def mean_loss(network, given: Batch, draws: int = 3000) -> float:
    rng = random.Random(0)
    trainer = SimpleNamespace(rng=lambda: rng)
    return sum(float(masked_loss.masked_loss(network, given, trainer).detach()) for _ in range(draws)) / draws


@pytest.fixture
def only_answers(monkeypatch):
    monkeypatch.setattr(masked_loss, "WHOLE", 0.0)
    monkeypatch.setattr(masked_loss, "BLOCKWISE", 0.0)


# --- loss ---

@pytest.mark.usefixtures("only_answers")
def test_the_mean_loss_is_the_enumerated_bound():
    network, ids = Scripted(), [3, 1, 2, 5, 7, 0]
    # 3000 draws: the standard error is below 0.03
    assert mean_loss(network, batch(ids, 2)) == pytest.approx(exact_bound(network, ids, 2), abs=0.1)


@pytest.mark.usefixtures("only_answers")
def test_without_the_weights_the_loss_would_be_another():
    """The mean over all masked tokens of all draws counts long masks more often."""
    network, ids = Scripted(), [3, 1, 2, 5, 7, 0]
    nats = [-network.rows[count].log_softmax(-1)[ids[2:]].mean().item() for count in range(1, 5)]
    plain = sum(count * loss for count, loss in zip(range(1, 5), nats)) / 10
    assert abs(plain - exact_bound(network, ids, 2)) > 0.15


@pytest.mark.usefixtures("only_answers")
def test_a_network_that_knows_nothing_loses_log_v():
    network = Scripted()
    network.rows.data.zero_()
    assert mean_loss(network, batch([3, 1, 2, 5, 7, 0], 2), 40) == pytest.approx(math.log(8), abs=1e-5)


# --- masks ---

def drawn(seed: int, asked: int = 4, length: int = 24) -> masked_loss.Masks:
    documents = np.ones((1, asked + length), np.int64)
    return masked_loss.draw(documents, np.arange(asked + length)[None] >= asked, random.Random(seed))


@pytest.mark.usefixtures("only_answers")
def test_questions_stay_visible_and_every_number_of_masks_is_equally_likely():
    counts = Counter()
    for seed in range(2400):
        masks = drawn(seed)
        assert not masks.hidden[0, :4].any() and (masks.weights > 0).tolist() == masks.hidden.tolist()
        counts[int(masks.hidden.sum())] += 1
    assert set(counts) == set(range(1, 25)) and all(abs(n - 100) < 45 for n in counts.values())  # 4.5 standard errors


def test_a_block_is_visible_before_it_and_masked_after_it(monkeypatch):
    monkeypatch.setattr(masked_loss, "WHOLE", 0.0)
    monkeypatch.setattr(masked_loss, "BLOCKWISE", 1.0)
    for seed in range(50):
        masks = drawn(seed)
        counted = np.flatnonzero(masks.weights[0])
        start = next(4 + at for at in range(0, 24, 8) if 4 + at <= counted[0] < 4 + at + masks.length)
        assert counted[-1] < start + 32 and not masks.hidden[0, :counted[0]].any()
        assert masks.hidden[0, start + masks.length:].all()


def test_the_first_token_of_a_whole_text_stays_since_nothing_predicts_it(monkeypatch):
    monkeypatch.setattr(masked_loss, "WHOLE", 1.0)
    hidden = np.stack([drawn(seed).hidden[0] for seed in range(200)])
    assert not hidden[:, 0].any() and hidden[:, 1:].any(0).all()


def test_no_text_sees_another():
    allowed = masked_loss.within_texts(torch.tensor([[1, 1, 2, 2]]))
    assert allowed[0, 0].tolist() == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2


# --- windows ---

def test_windows_hold_questions_answers_and_end_tokens(tmp_path, tokenizer):  # noqa: F811
    canvas_windows.build(tmp_path, tokenizer, 12_000, seed=1)
    for width in canvas_windows.STAGES:
        windows = Windows.load(tmp_path / f"train_{width}.npz")
        assert windows.ids.shape[1] == width
        for ids, weights, numbers in zip(windows.ids, windows.weights, windows.documents):
            for number in range(1, numbers.max() + 1):
                canvas = ids[(numbers == number) & (weights > 0)]
                assert len(canvas) % canvas_windows.CANVAS == 0 and END in canvas
                assert set(canvas[list(canvas).index(END):]) == {END}


def test_canvases_are_multiples_and_half_of_them_as_short_as_possible():
    lengths = [canvas_windows.canvas_length(19, random.Random(seed)) for seed in range(400)]
    assert set(lengths) <= set(range(32, 129, 16)) and 0.45 < lengths.count(32) / 400 < 0.75
    assert canvas_windows.canvas_length(130, random.Random(0)) == 144


def test_the_shares_name_tasks_of_the_world_and_the_denoiser_is_a_role_of_its_own():
    assert set(canvas_windows.SHARES) <= set(TASKS) and sum(canvas_windows.SHARES.values()) == pytest.approx(1.0)
    assert DENOISER.name not in ROLES and EVERY[DENOISER.name] is DENOISER
