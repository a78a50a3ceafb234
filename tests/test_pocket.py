"""Making windows of the small world, and that training and measuring on them works: seconds, on nano models."""
import itertools
import random
from functools import partial

import pytest
import torch

from playground.pocket import data
from playground.pocket import model as models
from playground.pocket import tokenizer as tokens
from playground.pocket import train as training
from playground.pocket.card import curve, table
from playground.pocket.distill import DraftLoss, soft
from playground.pocket.evaluate import GUESSES, exits, greedy, guessing, losses, played, repetition, rounds
from playground.pocket.muon import Muon, orthogonal
from playground.pocket.world import TASKS

EACH_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def some(task, count=40, seed=3, held_out=False):
    rng = random.Random(seed)
    return [task.generate(rng, held_out) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [f" {item.prompt} {item.answer}" for task in TASKS.values() for item in some(task)]
    return tokens.train(texts, size=600)


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A folder with a few training windows of every length, all of arithmetic."""
    rng = random.Random(1)
    packer = data.Packer(lambda: data._item(tokenizer, partial(TASKS["arithmetic"].generate, rng), data.ASKED))
    for width in data.STAGES:
        packer.cut(width, 6).save(tmp_path / f"train_{width}.npz")
    return tmp_path


def trainer(folder, out, **plan):
    model = models.for_training(models.make("nano", 600, seed=5))
    return training.Trainer(model, training.target_loss, training.Plan(tokens=512, warm_up=1, **plan), (folder, out))


# training

def test_a_few_steps_lower_the_loss(folder, tmp_path):
    run = trainer(folder, tmp_path / "run", steps=12)
    batch = run.batch()
    before = float(training.target_loss(run.model, batch, run).detach())
    run.state.taken.clear()
    for _ in range(6):
        run.step()
    assert float(training.target_loss(run.model, batch, run).detach()) < before - 0.3


def test_a_resumed_run_is_the_same_run(folder, tmp_path):
    whole, half = trainer(folder, tmp_path / "whole", steps=6), trainer(folder, tmp_path / "half", steps=6)
    whole.run()
    half.run(until=0.5)
    assert half.state.step == 3
    rest = trainer(folder, tmp_path / "half", steps=6)
    rest.resume()
    rest.run()
    assert rest.state.step == 6 and rest.state.taken == whole.state.taken
    assert same_weights(whole.model, rest.model) and not same_weights(half.model, rest.model)


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_the_rate_warms_up_stays_and_decays(folder, tmp_path):
    run = trainer(folder, tmp_path, steps=100)
    rates = []
    for run.state.step in range(100):
        rates.append(run.rate())
    assert rates[10] == rates[50] == 1 and rates[80] < 0.5 and rates[99] == pytest.approx(0.0222, abs=0.01)


def test_the_context_grows(folder, tmp_path):
    run = trainer(folder, tmp_path, steps=100)
    widths = []
    for run.state.step in range(100):
        widths.append(run.width())
    assert [width for width, _ in itertools.groupby(widths)] == [256, 512, 1024] and widths.count(256) == 60


def test_the_training_attention_is_the_usual_attention():
    model = models.make("nano", 600, seed=1).eval()
    ids = torch.randint(7, 600, (2, 40))
    usual = model(ids).logits
    assert torch.allclose(models.for_training(model).eval()(ids).logits, usual, atol=1e-4)


@pytest.mark.parametrize("attention", ["causal_matmul", "sdpa"])
def test_no_token_sees_another_document_of_its_window(attention):
    model = models.make("nano", 600, seed=1).eval()
    model.set_attn_implementation(attention)
    ids = torch.randint(7, 600, (1, 30))
    documents = torch.tensor([[1] * 12 + [2] * 18])
    together = model(ids, attention_mask=models.within_documents(documents)).logits
    alone = model(ids[:, 12:]).logits
    assert torch.allclose(together[:, 12:], alone, atol=1e-4)
    assert not torch.allclose(model(ids).logits[:, 12:], alone, atol=1e-2)


def test_muon_makes_directions_equal():
    noise = torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonal(noise * torch.logspace(0, -1, 48)))
    assert 0.4 < values.min() and values.max() < 1.4


def test_muon_walks_downhill():
    matrix = torch.nn.Parameter(torch.ones(8, 4))
    optimiser = Muon([matrix], lr=0.05)
    for _ in range(20):
        optimiser.zero_grad()
        (matrix ** 2).sum().backward()
        optimiser.step()
    assert matrix.detach().abs().mean() < 0.8


def test_the_loss_is_the_weighted_cross_entropy_and_so_is_its_gradient():
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(1), requires_grad=True)
    ids, weights = torch.randint(0, 11, (2, 5)), torch.rand(2, 5)
    loss = training.weighted(logits, ids, weights)
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    known = (each * weights).sum() / weights.sum()
    assert torch.allclose(loss, known)
    assert torch.allclose(*(torch.autograd.grad(x, logits)[0] for x in (loss, known)), atol=1e-6)


def test_distillation_asks_the_target_only_after_its_first_part(folder, tmp_path):
    target, draft = models.make("nano", 600, seed=1), models.for_training(models.make("nano", 600, seed=2))
    loss = DraftLoss(models.for_training(target), on_data=0.5)
    run = training.Trainer(draft, loss, training.Plan(steps=10, tokens=512), (folder, tmp_path))
    batch = run.batch()
    early = loss(draft, batch, run)
    run.state.step = 6
    late = loss(draft, batch, run)
    assert float(early.detach()) != float(late.detach()) and all(p.grad is None for p in target.parameters())


def test_distilled_from_itself_the_loss_is_the_entropy():
    logits = torch.randn(1, 3, 7)
    wanted = logits.softmax(-1)
    assert torch.allclose(soft(logits, wanted, torch.ones(1, 3)), -(wanted * wanted.log()).sum(-1).mean())


def test_a_saved_model_loads_in_bfloat16_and_says_the_same(tmp_path):
    model = models.for_training(models.make("nano", 600, seed=1))
    models.save(model, tmp_path)
    from transformers import AutoModelForCausalLM
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16 and loaded.config.use_cache
    assert loaded.generation_config.eos_token_id == tokens.SPECIALS.index(tokens.END)
    assert torch.allclose(loaded.lm_head.weight.float(), model.lm_head.weight, atol=1e-2)
    assert model.dtype == torch.float32


# evaluation

def test_speculation_rounds_are_counted_with_their_bonus():
    assert list(rounds([True] * 12, 5)) == [(5, 5), (5, 5)]
    assert list(rounds([False, False, True, True], 5)) == [(0, 1), (0, 1), (2, 2)]


def test_more_guesses_a_round_give_more_tokens_per_forward_up_to_the_first_wrong_one():
    agrees = [[True, True, True, True, False] * 6]
    three, five, eight = (played(agrees, guesses) for guesses in (3, 5, 8))
    assert three["tokens_per_forward"] == 30 / 12 and five["tokens_per_forward"] == eight["tokens_per_forward"] == 5
    assert three["acceptance"] == 18 / 24 and five["acceptance"] == 24 / 30


def test_a_model_guesses_itself_perfectly(tokenizer):
    model = models.make("nano", 600, seed=3).eval()
    prompts = [tokens.exchange(tokenizer, item)[0] for item in some(TASKS["facts"], 4)]
    answers = greedy(model, prompts, room=36)
    found = guessing(model, prompts, answers)["guessing"]
    assert found["5"] == dict(acceptance=1, tokens_per_forward=6) and found["8"]["tokens_per_forward"] == 9
    model.model.norm.weight.data.neg_()       # now the same model likes least what it liked most
    assert all(row["acceptance"] == 0 for row in guessing(model, prompts, answers)["guessing"].values())


def test_losses_and_exits_are_measured_within_documents(folder):
    data.Windows.load(folder / "train_256.npz").save(folder / "valid_arithmetic.npz")
    model = models.make("nano", 600, seed=3).eval()
    assert losses(model, folder)["arithmetic"] == pytest.approx(float(torch.tensor(600.).log()), abs=0.5)
    agreed = exits(model, folder)
    assert agreed["mean"] == agreed["arithmetic"] and agreed["mean"][-1] == 1 and len(agreed["mean"]) == 3


def test_repetition_sees_a_loop():
    assert repetition(list(range(50))) == 0
    assert repetition([1, 2, 3, 4] * 10) > 0.85


def test_card_pieces_are_made_from_measures():
    played_back = {str(n): dict(acceptance=0.8, tokens_per_forward=n / 2) for n in GUESSES}
    row = dict(score=0.5, right=0.25, tokens=7, words=dict(taught=0.6, kept=0.4), guessing=played_back)
    assert "| facts | 0.50 | 25% | 0.60 / 0.40 | 7 | 0.80 | 1.5 / 2.5 / 4.0 |" in table(dict(facts=row))
    picture = curve([(0, 8.0), (1_000_000, 3.0)])
    assert picture.startswith("<svg") and "1.0 M tokens" in picture and 'points="40.0,15.0 630.0,' in picture
