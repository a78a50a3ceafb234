"""Making windows of the small world, and that training and measuring on them works: seconds, on nano models."""
import gzip
import itertools
import json
import random
from functools import partial

import pytest
import torch

from playground.pocket import corpus, data
from playground.pocket import model as models
from playground.pocket import tokenizer as tokens
from playground.pocket import train as training
from playground.pocket.card import curve, table
from playground.pocket.distill import DraftLoss, soft
from playground.pocket.evaluate import GUESSES, exam, exits, greedy, guessing, losses, played, repetition, rounds
from playground.pocket.muon import Muon, orthogonal
from playground.pocket.world import TASKS, Item, score

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


# the tokenizer

@EACH_TASK
def test_any_text_survives_the_tokenizer(task, tokenizer):
    for item in some(task, 10):
        question, answer = tokens.exchange(tokenizer, item)
        assert tokenizer.decode(question).endswith(f"<|user|> {item.prompt.strip()}<|assistant|>")
        assert tokenizer.decode(answer, skip_special_tokens=True) == f" {item.answer.strip()}"


def test_bytes_beyond_english_survive(tokenizer):
    assert tokenizer.decode(tokenizer.encode("naïve 漢字 🐢\n\tend", add_special_tokens=False)) == "naïve 漢字 🐢\n\tend"


def test_every_digit_is_a_token_of_its_own_and_always_the_same(tokenizer):
    assert tokenizer.tokenize("1234")[-4:] == list("1234")
    assert tokenizer.tokenize("x = 1234,")[-5:-1] == list("1234")


def test_roles_and_ends_are_single_tokens(tokenizer):
    for place, special in enumerate(tokens.SPECIALS):
        assert tokenizer.encode(special, add_special_tokens=False) == [place]
    assert tokenizer.eos_token == tokens.END and tokenizer.mask_token == tokens.MASK


def test_the_chat_template_writes_what_training_showed(tokenizer):
    item = some(TASKS["facts"], 1)[0]
    chat = [dict(role="user", content=item.prompt), dict(role="assistant", content=item.answer)]
    question, answer = tokens.exchange(tokenizer, item)
    assert tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"] == question
    assert tokenizer.apply_chat_template(chat)["input_ids"] == question + answer


def test_the_turns_of_a_chat_are_what_the_chat_template_writes(tokenizer):
    item = some(TASKS["chat"], 1)[0]
    said = [*item.before, (item.prompt, item.answer)]
    chat = [dict(role=role, content=text) for turn in said for role, text in zip(("user", "assistant"), turn)]
    question, answer = tokens.exchange(tokenizer, item)
    assert tokenizer.apply_chat_template(chat)["input_ids"] == question + answer
    assert tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True)["input_ids"] == question


def test_a_saved_tokenizer_loads_as_any_other(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    text = "<|user|> What is 12 + 3?<|assistant|>"
    assert tokens.load(tmp_path).encode(text) == tokenizer.encode(text)


# windows

def test_windows_hold_whole_items_and_little_padding(folder, tokenizer):
    windows = data.Windows.load(folder / "train_256.npz")
    assert windows.ids.shape == (6, 257)
    assert (windows.weights == data.NOTHING).mean() < 0.1
    user, end = tokens.SPECIALS.index(tokens.USER), tokens.SPECIALS.index(tokens.END)
    assert all(row[0] == user and (row == user).sum() == (row == end).sum() for row in windows.ids)


def test_answers_weigh_fully_and_questions_a_tenth(tokenizer):
    question, answer = tokens.exchange(tokenizer, some(TASKS["lists"], 1)[0])
    ids, weights = data._weighted([(question, answer)], data.ASKED)
    assert weights == [data.ASKED] * len(question) + [data.FULL] * len(answer) and len(ids) == len(weights)


def test_every_answer_of_a_chat_weighs_fully_not_only_the_last(tokenizer):
    item = Item("Add 2.", "5", "chat", before=(("Take 3.", "3"),))
    ids, weights = data._item(tokenizer, lambda: item, data.ASKED)
    counted = [token for token, weight in zip(ids, weights) if weight == data.FULL]
    assert tokenizer.decode(counted) == " 3<|end|> 5<|end|>"


def test_every_item_of_a_window_is_a_document_of_its_own(folder):
    windows = data.Windows.load(folder / "train_256.npz")
    user, pad = tokens.SPECIALS.index(tokens.USER), tokens.SPECIALS.index(tokens.PAD)
    for ids, documents in zip(windows.ids, windows.documents):
        assert ((ids == pad) == (documents == 0)).all()
        assert (documents[ids == user] == range(1, documents.max() + 1)).all()


def test_running_text_changes_its_document_where_a_text_begins(tokenizer):
    windows = data.Stream(tokenizer, ["the fox", "the crow " * 9]).cut(32, 1)
    begins = windows.ids[0] == tokens.SPECIALS.index(tokens.END_OF_TEXT)
    assert (windows.documents[0] == begins.cumsum()).all() and windows.documents.max() >= 2


def test_shares_are_of_a_whole():
    assert sum(data.SHARES.values()) == pytest.approx(1)
    assert sum(data.STAGES.values()) == pytest.approx(1)
    assert set(TASKS) <= set(data.SHARES)


def test_running_text_is_read_on_and_starts_over(tokenizer):
    stream = data.Stream(tokenizer, ["the fox and the crow " * 20])
    first, second = stream.cut(16, 1), stream.cut(16, 1)
    assert first.ids[0, -1] == second.ids[0, 0]
    assert stream.cut(64, 4).ids.shape == (4, 65)


def test_the_windows_of_a_corpus_mix_all_sources_by_their_shares(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "tales.jsonl.gz", [dict(text=f"A tale of the {n} foxes. " * 60) for n in range(9)])
    sums = [dict(question=f"What is {n} + 1?", answer=f"#### {n + 1}") for n in range(200)]
    write(tmp_path / "gsm8k_train.jsonl.gz", sums)
    monkeypatch.setattr(data, "VALIDATION", (256, 2))
    monkeypatch.setattr(corpus, "code", lambda: (["x = 1\n" * 500], ["y = 2\n" * 500]))
    data.build((tmp_path, tmp_path), tokenizer, 60_000, seed=1)
    windows = data.Windows.load(tmp_path / "train_256.npz")
    told = sum("foxes. A tale" in tokenizer.decode(row) for row in windows.ids)
    assert told / len(windows.ids) == pytest.approx(data.SHARES["tales"], abs=0.02)
    asked = {path.name for path in tmp_path.glob("valid_*.npz")}
    assert asked == {f"valid_{name}.npz" for name in data.SHARES if name != "notices"}


def write(path, rows):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_problems_lose_their_calculator_marks():
    item = corpus._problem(dict(question="How many?", answer="2+2 = <<2+2=4>>4\n#### 4"))
    assert item.answer == "2+2 = 4\n#### 4" and score(item, item.answer) == 1


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


def test_the_exam_has_a_row_for_every_task_and_grade_and_only_held_out_items():
    rows = exam(2, seed=1)
    assert set(TASKS) <= set(rows) and "records, grade 4" in rows and "arithmetic, drills 2" in rows
    assert {"context_qa, against memory", "context_qa, as in memory", "needle, grade 6"} <= set(rows)
    assert all(item.grade == 3 for item in rows["lists, grade 3"])
    assert rows == exam(2, seed=1) and rows != exam(2, seed=2)


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
