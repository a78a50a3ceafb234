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

from playground.pocket import architecture
from playground.pocket import tokenizer as tokens
from playground.pocket.data import FULL, NOTHING, Batch, Windows
from playground.pocket.model_roles import DENOISERS, EVERY, ROLES
from playground.pocket.training import block_loss, canvas_windows, masked_loss
from playground.questions.world import TASKS

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
    row = np.array([ids], np.uint16)
    weights = np.array([[NOTHING] * asked + [FULL] * (len(ids) - asked)], np.uint8)
    return Windows(row, weights, np.ones_like(weights)).tensors()


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
        counted = np.flatnonzero(masks.weights[0] >= 1)
        later = np.flatnonzero(masks.weights[0] == np.float32(masked_loss.LATER))
        stop = later[0] if len(later) else 28
        assert counted[-1] < stop and not masks.hidden[0, :counted[0]].any() and masks.hidden[0, stop:].all()
        block = masks.length - masked_loss.LATER * len(later)  # the weights of the block add up to its length
        assert masks.weights[0, counted].sum() == pytest.approx(block) and counted[0] >= stop - round(block)


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
    assert not DENOISERS.keys() & ROLES.keys() and DENOISERS.keys() <= EVERY.keys()


# --- blocks ---

def streams(length: int, seed: int = 0, asked: int = 6, answer: int = 18) -> block_loss.Streams:
    """Two texts in one window, each with a question and an answer."""
    documents = np.repeat([[1, 2]], asked + answer, 1)
    answers = np.tile(np.arange(asked + answer) >= asked, 2)[None]
    return block_loss.draw(documents, answers, length, random.Random(seed))


@pytest.mark.parametrize("length", block_loss.BLOCKS)
def test_every_token_of_an_answer_counts_once(length):
    counted = streams(length).counted[2].tolist()
    assert sorted(counted) == [*range(6, 24), *range(30, 48)]


@pytest.mark.parametrize("length", [4, 8])
def test_noised_copies_see_their_block_and_the_clean_text_before_it(length):
    drawn = streams(length)
    allowed, entries = drawn.allowed[0, 0], range(drawn.at.shape[1])
    for one, other in itertools.product(entries, entries):
        arrays = drawn.document, drawn.copy, drawn.block
        texts, copies, blocks = ((array[0, one], array[0, other]) for array in arrays)
        if copies[0] == copies[1] and blocks[0] == blocks[1]:
            seen = True
        else:
            seen = copies[1] == 0 and blocks[1] < blocks[0]
        assert allowed[one, other] == (seen and texts[0] == texts[1])


def test_a_masked_token_is_predicted_from_the_entry_before_it_in_its_copy_and_the_first_of_a_block_from_clean_text():
    drawn = streams(4)
    for row, entry, predicted in drawn.counted.T:
        assert drawn.at[row, entry] == predicted - 1
        first = (predicted % 24) % 4 == 0
        assert (drawn.copy[row, entry] == 0) == first
        if not first:
            assert drawn.hidden[row, entry + 1] and drawn.at[row, entry + 1] == predicted


def test_the_copies_have_complementary_masks_and_the_clean_text_has_none():
    drawn = streams(8)
    hidden = [{int(at) for at in drawn.at[0][drawn.hidden[0] & (drawn.copy[0] == copy)]} for copy in (0, 1, 2)]
    assert not hidden[0] and not hidden[1] & hidden[2] and len(hidden[1] | hidden[2]) == 36


def test_with_blocks_of_one_position_the_loss_is_the_next_token_loss_of_a_causal_model():
    model = architecture.for_training(architecture.make("nano", 600))
    ids = torch.randint(7, 600, (1, 48), generator=torch.Generator().manual_seed(0))
    weights = np.array([([NOTHING] * 6 + [FULL] * 18) * 2], np.uint8)
    window = Windows(ids.numpy(), weights, np.array([[1] * 24 + [2] * 24], np.uint8)).tensors()
    trainer = SimpleNamespace(rng=lambda: SimpleNamespace(choice=lambda lengths: 1, getrandbits=lambda bits: 0))
    found = float(block_loss.block_loss(model, window, trainer).detach())
    counted = [*range(6, 24), *range(30, 48)]
    rows = torch.cat([model(ids[:, :24]).logits[0], model(ids[:, 24:]).logits[0]]).log_softmax(-1)
    expected = -float(torch.stack([rows[at - 1, ids[0, at]] for at in counted]).mean().detach())
    assert found == pytest.approx(expected, abs=0.02)  # the training's matmuls are in bfloat16
