"""From the small world to training windows: the tokenizer, the packing, the weights and the documents."""
import gzip
import json

import pytest
from pocket_windows import folder, some, tokenizer  # noqa: F401

from playground.errors import Refusal
from playground.pocket import corpus, data
from playground.pocket import tokenizer as tokens
from playground.pocket.cards.evaluate import ROOM, exam
from playground.questions.world import TASKS, Item, score

EACH_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


# the tokenizer

@EACH_TASK
def test_any_text_survives_the_tokenizer(task, tokenizer):
    for item in some(task, 10):
        question, answer = tokens.exchange(tokenizer, item)
        assert tokenizer.decode(question).endswith(f"<|user|> {item.prompt.strip()}<|assistant|>")
        assert tokenizer.decode(answer, skip_special_tokens=True) == f" {item.answer.strip()}"


def test_bytes_beyond_english_survive(tokenizer):
    text = "naïve 漢字 🐢\n\tend"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_digit_is_a_token_of_its_own_and_always_the_same(tokenizer):
    assert tokenizer.tokenize("1234")[-4:] == list("1234")
    assert tokenizer.tokenize("x = 1234,")[-5:-1] == list("1234")


def test_roles_and_ends_are_single_tokens(tokenizer):
    for place, special in enumerate(tokens.SPECIALS):
        assert tokenizer.encode(special, add_special_tokens=False) == [place]
    assert tokenizer.eos_token == tokens.END and tokenizer.mask_token == tokens.MASK


def test_the_chat_template_matches_the_training_format(tokenizer):
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


def test_answers_have_full_loss_weight_and_questions_a_tenth(tokenizer):
    question, answer = tokens.exchange(tokenizer, some(TASKS["lists"], 1)[0])
    ids, weights = data._weighted([(question, answer)], data.ASKED)
    assert weights == [data.ASKED] * len(question) + [data.FULL] * len(answer) and len(ids) == len(weights)


def test_every_answer_of_a_chat_has_full_loss_weight(tokenizer):
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
    windows = data.TokenStream(tokenizer, ["the fox", "the crow " * 9]).cut(32, 1)
    begins = windows.ids[0] == tokens.SPECIALS.index(tokens.END_OF_TEXT)
    assert (windows.documents[0] == begins.cumsum()).all() and windows.documents.max() >= 2


def test_shares_are_of_a_whole():
    assert sum(data.SHARES.values()) == pytest.approx(1)
    assert sum(data.STAGES.values()) == pytest.approx(1)
    assert set(TASKS) <= set(data.SHARES)


def test_running_text_continues_and_restarts_at_its_end(tokenizer):
    stream = data.TokenStream(tokenizer, ["the fox and the crow " * 20])
    first, second = stream.cut(16, 1), stream.cut(16, 1)
    assert first.ids[0, -1] == second.ids[0, 0]
    assert stream.cut(64, 4).ids.shape == (4, 65)


@pytest.mark.slow
def test_the_windows_of_a_corpus_mix_all_sources_by_their_shares(tmp_path, tokenizer, monkeypatch):
    write(tmp_path / "tales.jsonl.gz", [dict(text=f"A tale of the {n} foxes. " * 60) for n in range(9)])
    sums = [dict(question=f"What is {n} + 1?", answer=f"#### {n + 1}") for n in range(200)]
    write(tmp_path / "gsm8k_train.jsonl.gz", sums)
    monkeypatch.setattr(data, "VALIDATION", (256, 2))
    monkeypatch.setattr(corpus, "code", lambda: (["x = 1\n" * 500], ["y = 2\n" * 500]))
    data.build((tmp_path, tmp_path), tokenizer, 30_000, seed=1)
    windows = data.Windows.load(tmp_path / "train_256.npz")
    in_tales = sum("foxes. A tale" in tokenizer.decode(row) for row in windows.ids)
    assert in_tales / len(windows.ids) == pytest.approx(data.SHARES["tales"], abs=0.02)
    asked = {path.name for path in tmp_path.glob("valid_*.npz")}
    assert asked == {f"valid_{name}.npz" for name in data.SHARES if name not in ("notices", "recall", "revise")}, (
        "three sources are only there to teach"
    )


def write(path, rows):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_problems_lose_their_calculator_marks():
    item = corpus._problem(dict(question="How many?", answer="2+2 = <<2+2=4>>4\n#### 4"))
    assert item.answer == "2+2 = 4\n#### 4" and score(item, item.answer) == 1


# the exam

@pytest.mark.slow
def test_the_exam_has_a_row_for_every_task_and_grade_and_only_held_out_items():
    rows = exam(2, seed=1)
    assert set(TASKS) <= set(rows) and "records, grade 4" in rows and "arithmetic, drills 2" in rows
    assert {"context_qa, against memory", "context_qa, as in memory", "needle, grade 6"} <= set(rows)
    assert all(item.grade == 3 for item in rows["lists, grade 3"])
    assert rows == exam(2, seed=1) and rows != exam(2, seed=2)


@pytest.mark.slow
def test_every_answer_of_the_exam_fits_its_length_limit(tokenizer):
    bundled = tokens.load("assets/models/pocket")
    for row, items in exam(6, seed=2).items():
        assert all(len(tokens.exchange(bundled, item)[1]) <= ROOM[item.task] for item in items), row


def test_items_that_never_fit_end_the_packing_with_a_sentence():
    packer = data.Packer(lambda: ([1] * 300, [100] * 300))
    with pytest.raises(Refusal, match="longer than a window of 257 tokens"):
        packer.cut(256, 1)
