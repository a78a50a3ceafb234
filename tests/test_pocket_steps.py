"""The commands that make the pocket models, from the tokenizer to the finished folders, on nano models and a few texts.
"""
import gzip
import json
import os
import random
import signal
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from playground.errors import Refusal
from playground.pocket import architecture as models
from playground.pocket import corpus, data
from playground.pocket import pipeline as steps
from playground.pocket import tokenizer as tokens
from playground.pocket.__main__ import main, parse
from playground.pocket.atomic_files import new_folder, read_checkpoint, write_checkpoint, write_text
from playground.pocket.model_roles import ROLES
from playground.pocket.training import target_samples as samples
from playground.pocket.training import train
from playground.questions.world import TASKS


def do(words, **options):
    """One command, as from the command line."""
    parsed = parse([*words.split(), *(str(part) for name, value in options.items() for part in (f"--{name}", value))])
    steps.COMMANDS[parsed.command](parsed)


@pytest.fixture(scope="module")
def small():
    """Smaller sizes: few texts, validation windows and tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "VALIDATION", (256, 2))
        patch.setattr(corpus, "code", lambda: (["x = 1\n" * 500], ["y = 2\n" * 500]))
        patch.setattr(corpus, "natural", lambda folder: sentences(seed=2))
        patch.setattr(data, "tokenizer_texts", lambda folder, seed: sentences(seed))
        patch.setattr(tokens, "OWN", tokens.OWN | dict(size=900))
        patch.setattr(samples, "ROOM", 12)
        patch.setattr(train, "NOTED", 1)
        yield


def sentences(seed, count=120):
    """Some items of every task as running text."""
    rng = random.Random(seed)
    return [
        f" {item.prompt} {item.answer}"
        for task in TASKS.values()
        for item in (task.generate(rng) for _ in range(count))
    ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A corpus folder."""
    folder = tmp_path_factory.mktemp("corpus")
    write(folder / "tales.jsonl.gz", [dict(text=f"A tale of the {n} foxes who met a crow. " * 60) for n in range(9)])
    write(
        folder / "gsm8k_train.jsonl.gz",
        [dict(question=f"What is {n} + 1?", answer=f"#### {n + 1}") for n in range(200)],
    )
    return folder


def write(path, rows):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def out(small, texts, tmp_path_factory):
    """A working folder in which the target has been trained for some steps and has written texts."""
    out = tmp_path_factory.mktemp("work")
    do("tokenizer", corpus=texts, out=out)
    do("data --tokens 2e4", corpus=texts, out=out)
    do("train --size nano --batch 256 --minutes 9 --piece 0.005", out=out)
    do("samples --texts 40", out=out)
    return out


@pytest.fixture
def blank(small, out, tmp_path):
    """A working folder with the target's tokenizer and windows, and no training."""
    for name in ("tokenizer", "data-target"):
        (tmp_path / name).symlink_to(out / name)
    return tmp_path


# pieces of a training

@pytest.mark.bench
def test_a_partial_training_can_be_resumed(blank, capsys):
    do("train --size nano --minutes 9 --piece 0.01", out=blank)
    first, plan = train.read_state(blank / "target")
    assert "continue with --resume" in capsys.readouterr().out and 0 < first.seconds / 60 / 9 < 1
    do("train --size nano --piece 0.01 --resume", out=blank)
    second, same = train.read_state(blank / "target")
    assert second.step > first.step and second.seconds > first.seconds and same == plan


@pytest.mark.slow
def test_a_finished_training_says_so_and_its_budget_can_be_raised(blank, capsys):
    do("train --size nano --minutes 0.01", out=blank)
    assert "finished" in capsys.readouterr().out
    do("train --size nano --minutes 5 --piece 0.01 --resume", out=blank)
    assert train.read_state(blank / "target")[1].minutes == 5 and "continue" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_training_ends_between_two_steps_and_is_saved(blank):
    windows = (blank / "data-target", blank / "target")
    model = models.for_training(models.make("nano", 4096))
    run = train.Trainer(model, train.target_loss, train.TrainingPlan(steps=1000, tokens=512), windows)
    note = run._note

    def third_step_interrupted(loss, count):
        note(loss, count)
        if run.state.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    run._note, before = third_step_interrupted, signal.getsignal(signal.SIGINT)
    run.run()
    assert train.read_state(blank / "target")[0].step == 3
    assert signal.getsignal(signal.SIGINT) is before


# refusals, and nothing overwritten

def test_a_started_training_is_not_restarted(out):
    before = (out / "target" / "checkpoint.pt").read_bytes()
    with pytest.raises(Refusal, match="add --resume"):
        do("train --size nano", out=out)
    assert (out / "target" / "checkpoint.pt").read_bytes() == before


def test_resuming_without_a_checkpoint_is_refused(blank):
    with pytest.raises(Refusal, match="nothing to resume"):
        do("train --size nano --resume", out=blank)
    assert not (blank / "target").exists()


def test_a_checkpoint_of_another_shape_is_refused_and_left_alone(out):
    before = (out / "target" / "checkpoint.pt").read_bytes()
    with pytest.raises(Refusal, match="2 layers of width 32 and .* not with 8 layers of width 256"):
        do("train --size small --resume", out=out)
    assert (out / "target" / "checkpoint.pt").read_bytes() == before


def test_a_broken_checkpoint_is_refused(blank):
    (blank / "target").mkdir()
    (blank / "target" / "checkpoint.pt").write_bytes(b"half a file")
    with pytest.raises(Refusal, match="cannot be read"):
        do("train --size nano --resume", out=blank)


@pytest.mark.parametrize("command", ["tokenizer", "data"])
def test_an_absent_corpus_is_named_before_anything_is_written(command, blank, tmp_path):
    with pytest.raises(Refusal, match="There is no tales.jsonl.gz in .*nowhere"):
        do(command, corpus=tmp_path / "nowhere", out=blank / "new")
    assert not (blank / "new").exists()


@pytest.mark.parametrize(
    "command, first",
    [
        ("train --role draft", "data --role draft"),
        ("samples", "train --role target"),
        ("evaluate", "train --role target"),
    ],
)
def test_a_missing_step_is_named(command, first, blank):
    with pytest.raises(Refusal, match=f"run `python -m playground.pocket {first}` first"):
        do(command, out=blank)


def test_in_an_empty_folder_the_first_steps_are_named(tmp_path, texts):
    with pytest.raises(Refusal, match="playground.pocket data --role target` first"):
        do("train", out=tmp_path)
    with pytest.raises(Refusal, match="playground.pocket tokenizer` first"):
        do("data", corpus=texts, out=tmp_path)


@pytest.mark.parametrize("command", ["tokenizer", "data --tokens 2e4", "samples --texts 2"])
def test_finished_steps_are_not_repeated(command, out, texts):
    folder = out / dict(tokenizer="tokenizer", data="data-target", samples="samples")[command.split()[0]]
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(Refusal, match="exists already"):
        do(command, out=out, **({} if "samples" in command else dict(corpus=texts)))
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_missing_device_is_refused(blank):
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(Refusal, match="no cuda device"):
        do("train --device cuda", out=blank)


def test_a_refusal_ends_the_program_with_its_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["pocket", "samples", "--out", str(tmp_path), "--threads", "1"])
    with pytest.raises(SystemExit, match="There is no .*tokenizer"):
        main()


# a full disk

@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the always full device of Linux")
def test_a_full_disk_leaves_the_previous_checkpoint_intact(tmp_path):
    path = tmp_path / "checkpoint.pt"
    write_checkpoint(dict(step=1), path)
    path.with_suffix(".part").symlink_to("/dev/full")
    with pytest.raises(Refusal, match="could not be written .*--resume"):
        write_checkpoint(dict(weights=torch.zeros(100_000)), path)
    assert read_checkpoint(path) == dict(step=1) and list(tmp_path.iterdir()) == [path]


def test_an_incomplete_folder_is_removed(tmp_path):
    with pytest.raises(Refusal, match="No space left"), new_folder(tmp_path / "made") as folder:
        (folder / "some").write_text("text")
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_could_not_be_replaced_is_unchanged(tmp_path):
    with new_folder(tmp_path / "made") as folder:
        (folder / "old").write_text("text")
    with pytest.raises(Refusal), new_folder(tmp_path / "made", replace=True) as folder:
        raise OSError(28, "No space left on device")
    assert (tmp_path / "made" / "old").read_text() == "text"
    with new_folder(tmp_path / "made", replace=True) as folder:
        (folder / "new").write_text("text")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["new"]


def test_a_failed_write_keeps_the_earlier_measurements(tmp_path):
    write_text(tmp_path / "measures", "old")
    with pytest.raises(Refusal):
        write_text(tmp_path / "absent" / "measures", "new")
    assert (tmp_path / "measures").read_text() == "old"


# texts of the target, and the drafts

def test_the_texts_of_the_target_are_its_answers_to_questions_and_its_continuations(out):
    pairs = samples.load(out / "samples" / "texts.jsonl")
    asked = [read for read, _ in pairs if read.startswith("<|user|>") and read.endswith("<|assistant|>")]
    assert len(pairs) == 40 and len(asked) >= 20 and all(said for _, said in pairs)


@pytest.mark.slow
def test_a_share_of_a_drafts_windows_is_written_by_the_target(out, texts):
    tokenizer = tokens.load(out / "tokenizer")
    pairs = [("<|user|> Who?<|assistant|>", " The unmistakable zebra.<|end|>")] * 400
    with new_folder(out / "mixed") as folder:
        data.build((texts, folder), tokenizer, 20_000, 0)
        samples.mix_in(folder, pairs, tokenizer, seed=1)
        windows = data.Windows.load(folder / "train_256.npz")
    zebras = sum("unmistakable zebra" in tokenizer.decode(row) for row in windows.ids)
    assert zebras / len(windows.ids) == pytest.approx(samples.SHARE, abs=0.03)
    assert len(windows.ids) == len(data.Windows.load(out / "data-target" / "train_256.npz").ids)


def test_prompts_have_a_low_loss_weight_and_answers_full_weight(out):
    tokenizer = tokens.load(out / "tokenizer")
    ids, weights = samples._item(tokenizer, ("<|user|> Who?<|assistant|>", " Me.<|end|>"))
    said = len(tokenizer.encode(" Me.<|end|>"))
    assert weights == [data.ASKED] * (len(ids) - said) + [data.FULL] * said


def test_a_draft_needs_texts_of_the_target_first(blank, texts):
    with pytest.raises(Refusal, match="run `python -m playground.pocket samples` first"):
        do("data --role draft", corpus=texts, out=blank)


@pytest.mark.slow
def test_the_other_draft_has_a_vocabulary_of_its_own(out, texts):
    do("tokenizer --role other-draft", corpus=texts, out=out)
    ours, theirs = (tokens.load(role.tokenizer(out)).get_vocab() for role in (ROLES["target"], ROLES["other-draft"]))
    shared = [text for text in ours.keys() & theirs.keys() if ours[text] != theirs[text]]
    assert len(theirs) < len(ours) and theirs.keys() - ours.keys() and shared
    assert all(ours[special] == theirs[special] for special in tokens.SPECIALS)


@pytest.mark.bench
def test_from_the_first_text_to_the_finished_models(out, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(steps.measuring, "ROOM", dict.fromkeys(steps.measuring.ROOM, 4))
    monkeypatch.setattr(steps.measuring.free_text, "__defaults__", (6,))
    monkeypatch.setattr(steps.measuring, "TASKS", {"facts": steps.measuring.TASKS["facts"]})
    if not ROLES["other-draft"].tokenizer(out).exists():
        do("tokenizer --role other-draft", corpus=texts, out=out)
    for role in ("draft", "other-draft"):
        do(f"data --tokens 2e4 --role {role}", corpus=texts, out=out)
        do(f"train --size nano --batch 256 --minutes 0.01 --role {role}", out=out)
    do("evaluate --items 1", out=out)
    do("publish", corpus=texts, out=out, assets=tmp_path)
    for role in ROLES.values():
        made = tmp_path / role.published
        assert {"README.md", "loss.svg", "evaluation.json", "model.safetensors"} <= {
            path.name for path in made.iterdir()
        }
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / role.tokenizer_in)
        assert AutoModelForCausalLM.from_pretrained(made).config.vocab_size == len(tokenizer)
        assert json.loads((made / "evaluation.json").read_text())["tokens_seen"] > 0
    with pytest.raises(Refusal, match="exists already"):
        do("publish", corpus=texts, out=out, assets=tmp_path)
    monkeypatch.setattr(steps, "read_state", lambda folder: (train.TrainingState(), train.TrainingPlan()))
    with pytest.raises(Refusal, match="hardly begun"):
        do("publish --replace", corpus=texts, out=out, assets=tmp_path)
    assert (tmp_path / "pocket" / "README.md").exists()
