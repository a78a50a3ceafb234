"""What the pocket models are trained on, and that training them works: seconds, on nano models."""
import gzip
import itertools
import json
import random
import re
from functools import partial

import jsonschema
import pytest
import torch

from playground.pocket import corpus, data
from playground.pocket import model as models
from playground.pocket import tokenizer as tokens
from playground.pocket import train as training
from playground.pocket.card import curve, table
from playground.pocket.distill import DraftLoss, soft
from playground.pocket.evaluate import GUESSES, greedy, guessing, repetition, rounds
from playground.pocket.muon import Muon, orthogonal
from playground.pocket.world import TASKS, context_qa, facts, is_held_out, needle, programs, records, score

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


# the world

@EACH_TASK
def test_the_same_seed_gives_the_same_items(task):
    assert some(task) == some(task)
    assert some(task) != some(task, seed=4)


@EACH_TASK
def test_the_known_answer_scores_one_and_a_corrupted_one_less(task):
    for item in some(task, 8):
        assert score(item, item.answer) == score(item, f" {item.answer}\n") == 1
        assert score(item, corrupted(item)) < 1
        assert score(item, "") < 1


def corrupted(item):
    """The answer as a poor model might give it: its last digit, word or letter is another one."""
    if item.task in ("arithmetic", "needle") and item.answer[-1].isdigit():
        return item.answer[:-1] + str((int(item.answer[-1]) + 1) % 10)
    if item.task == "programs":
        return item.answer.rpartition("return")[0] + "return None"
    return item.answer[: len(item.answer) // 2]


@EACH_TASK
def test_held_out_items_are_never_trained_on(task):
    trained, kept = some(task, 300), some(task, 60, held_out=True)
    if task is TASKS["programs"]:
        assert not {item.meta["body"] for item in trained} & {item.meta["body"] for item in kept}
    elif task is TASKS["stories"]:
        assert not {item.answer for item in trained} & {item.answer for item in kept}
    else:
        assert not {item.prompt for item in trained} & {item.prompt for item in kept}


def test_a_hash_keeps_about_one_key_in_sixteen():
    assert 40 < sum(is_held_out(f"question {i}") for i in range(1000)) < 90


def test_facts_have_twelve_wordings_and_keep_two_for_the_test():
    for attribute, wordings in facts.QUESTIONS.items():
        assert len(set(wordings)) >= 12
        assert set(facts.wordings(attribute, True)) | set(facts.wordings(attribute, False)) == set(wordings)
        assert len(facts.wordings(attribute, True)) == 2


def test_the_answer_to_a_passage_is_a_span_of_it():
    for item in some(TASKS["context_qa"], 200):
        assert item.answer in item.meta["passage"]


def test_few_passages_contradict_memory_and_never_about_the_kept_attributes():
    items = some(TASKS["context_qa"], 2000)
    against = [item for item in items if item.meta["kind"] == "contradicts"]
    assert 0.03 < len(against) / len(items) < 0.07
    untouched = {known[a] for known in facts.COUNTRY.values() for a in context_qa.NEVER_CONTRADICTED if a in known}
    assert not any(item.meta["memory"] in untouched for item in against)


def test_a_contradicting_passage_says_otherwise_than_memory():
    rng = random.Random(2)
    for item in (context_qa.contradicting(rng) for _ in range(50)):
        assert item.meta["memory"] and item.meta["memory"] != item.answer


def test_every_step_of_a_worked_problem_is_true():
    for item in some(TASKS["arithmetic"], 300):
        steps = re.findall(r"^(\d+) ([-+*]) (\d+) = (\d+)$", item.answer, re.MULTILINE)
        assert steps and all(training_sum(x, op, y) == int(z) for x, op, y, z in steps)


def training_sum(x, op, y):
    return {"+": int(x) + int(y), "-": int(x) - int(y), "*": int(x) * int(y)}[op]


def test_a_problem_of_a_grade_has_that_many_steps():
    for grade in (1, 2, 3):
        item = TASKS["arithmetic"].problem(random.Random(grade), grade)
        assert item.answer.count("=") == grade


def test_records_follow_their_schema_and_the_prompt_shows_it():
    for item in some(records, 200):
        jsonschema.validate(json.loads(item.answer), item.meta["schema"])
        assert records.notation(item.meta["schema"]) in item.prompt


def test_a_record_with_a_missing_field_breaks_its_schema():
    item = some(records, 1)[0]
    value = json.loads(item.answer)
    value.popitem()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, item.meta["schema"])


def test_arrays_and_booleans_are_frequent():
    items = some(records, 300)
    assert sum("[" in item.answer for item in items) > 120
    assert sum("true" in item.answer or "false" in item.answer for item in items) > 120


def test_an_edit_changes_the_text_but_little():
    for item in some(TASKS["edit"], 100):
        before, after = item.meta["before"].split(), item.answer.split()
        assert before != after and len(set(before) & set(after)) > 0.3 * len(set(before))


@pytest.mark.parametrize("code", [
    "import os\ndef work(items): return 1", "def work(items):\n    while True: pass",
    "def work(items): return open('x', 'w')", "def work(items): return ().__class__", "def work(",
])
def test_a_program_may_not_import_loop_forever_or_touch_files(code):
    assert programs.run(code, "work") is None
    assert programs.run("def work(items): return 1", "work") == [1] * len(programs.INPUTS)


def test_a_needle_is_hidden_once_and_deeper_passages_are_longer():
    short, long = (needle.sized(random.Random(1), (n,)) for n in (4, 64))
    assert len(long.prompt) > 8 * len(short.prompt)
    assert long.meta["place"] <= 64


def test_a_shuffled_list_may_come_in_any_order():
    shuffled = (item for item in some(TASKS["lists"], 200) if item.meta["kind"] == "shuffle")
    item = next(item for item in shuffled if item.meta["length"] > 2)
    words = item.answer.split(", ")
    assert score(item, ", ".join(words[::-1])) == 1 and score(item, ", ".join(words[1:])) == 0


# the tokenizer

@EACH_TASK
def test_any_text_survives_the_tokenizer(task, tokenizer):
    for item in some(task, 10):
        question, answer = tokens.exchange(tokenizer, item)
        assert tokenizer.decode(question) == f"<|user|> {item.prompt.strip()}<|assistant|>"
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
    ids, weights = data._weighted((question, answer), data.ASKED)
    assert weights == [data.ASKED] * len(question) + [data.FULL] * len(answer) and len(ids) == len(weights)


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
    ids, weights = run.batch()
    before = float(training.target_loss(run.model, ids, weights, run).detach())
    run.state.taken.clear()
    for _ in range(6):
        run.step()
    assert float(training.target_loss(run.model, ids, weights, run).detach()) < before - 0.3


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
    ids, weights = run.batch()
    early = loss(draft, ids, weights, run)
    run.state.step = 6
    late = loss(draft, ids, weights, run)
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
    assert list(rounds([True] * 12)) == [(5, 5), (5, 5)]
    assert list(rounds([False, False, True, True])) == [(0, 1), (0, 1), (2, 2)]


def test_a_model_guesses_itself_perfectly(tokenizer):
    model = models.make("nano", 600, seed=3).eval()
    prompts = [tokens.exchange(tokenizer, item)[0] for item in some(TASKS["facts"], 4)]
    answers = greedy(model, prompts, room=2 * (GUESSES + 1))
    found = guessing(model, prompts, answers)
    assert found["acceptance"] == 1 and found["tokens_per_forward"] == pytest.approx(GUESSES + 1)
    model.model.norm.weight.data.neg_()       # now the same model likes least what it liked most
    assert guessing(model, prompts, answers)["acceptance"] == 0


def test_repetition_sees_a_loop():
    assert repetition(list(range(50))) == 0
    assert repetition([1, 2, 3, 4] * 10) > 0.85


def test_card_pieces_are_made_from_measures():
    row = dict(score=0.5, right=0.25, tokens=7, acceptance=0.8, tokens_per_forward=3.2)
    assert "| facts | 0.50 | 25% | 7 | 0.80 | 3.2 |" in table(dict(facts=row))
    picture = curve([(0, 8.0), (1_000_000, 3.0)])
    assert picture.startswith("<svg") and "1.0 M tokens" in picture and 'points="40.0,15.0 630.0,' in picture
