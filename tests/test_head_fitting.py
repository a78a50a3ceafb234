"""Training of draft heads: on the target's own texts, the same after an interruption, and never another model's."""
from __future__ import annotations

import json

import pytest
import torch
from pairs import VOCABULARY, network, pair
from saved import save_models

from playground.cli import main
from playground.contract import find
from playground.decoding.models import Models
from playground.errors import Refusal
from playground.events import Figure
from playground.training import head_fitting, target_texts
from playground.training.fitting import Fitting
from playground.training.head_fitting import OwnTexts, fit_head
from playground.training.target_texts import TargetText
from support.speculation import speculative_lane
from support.speculative_runs import recorded

EPOCHS = 3
SLOW_LEARNERS = ("kangaroo", "ppd")  # need more texts than these to learn
TRAINED = (
    "medusa", "hydra", "hydra_plus_plus", "eagle", "eagle_3", "fspad", "clover", "clover_2", "chimera", "falcon",
    "hidden_transfer", "longspec", "dflash", "mtp", "p_eagle", *SLOW_LEARNERS,
)  # fmt: skip


class Interrupted(Exception):
    pass


@pytest.fixture
def texts(monkeypatch) -> list[TargetText]:
    """Texts in which each token determines the next, so that a head has something to learn."""
    chance = torch.Generator().manual_seed(0)
    following = torch.randperm(VOCABULARY, generator=chance).tolist()
    made = []
    for start in torch.randperm(VOCABULARY, generator=chance)[:40].tolist():
        tokens = [start]
        while len(tokens) < 14:
            tokens.append(following[tokens[-1]])
        made.append(TargetText(tokens, 4))
    monkeypatch.setattr(head_fitting, "target_texts", lambda *given: made)
    monkeypatch.setattr(head_fitting, "BATCH", 100)
    return made


def fitted(name: str, tmp_path, seed: int = 0, stop_in_epoch: int = 0) -> dict:
    """Weights of a short training; with `stop_in_epoch` it is interrupted in that epoch."""
    def progress(share, text):
        if text.startswith(f"Epoch {stop_in_epoch} "):
            raise Interrupted

    place = tmp_path / "head.training"
    return fit_head(find(name), Fitting(pair().target, place, seed=seed, progress=progress, epochs=EPOCHS))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_an_interrupted_training_ends_with_the_same_weights(name, texts, tmp_path):
    whole = fitted(name, tmp_path)
    with pytest.raises(Interrupted):
        fitted(name, tmp_path, stop_in_epoch=2)
    assert (tmp_path / "head.training").exists()
    resumed = fitted(name, tmp_path)
    assert not (tmp_path / "head.training").exists()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("epochs, passes", [(2, 2), (0, 12)])
def test_a_training_makes_as_many_passes_as_asked_for_or_as_the_head_needs(epochs, passes, texts, tmp_path):
    said = []
    place = tmp_path / "head.training"
    fit_head(find("medusa"), Fitting(pair().target, place, progress=lambda *at: said.append(at[1]), epochs=epochs))
    assert {text.split(",")[0] for text in said} == {f"Epoch {number + 1} of {passes}" for number in range(passes)}


@pytest.mark.slow
def test_a_checkpoint_of_another_seed_or_one_that_was_cut_off_is_not_resumed(texts, tmp_path):
    whole = fitted("medusa", tmp_path, seed=1)
    with pytest.raises(Interrupted):
        fitted("medusa", tmp_path, seed=0, stop_in_epoch=2)
    other = fitted("medusa", tmp_path, seed=1)
    assert all(torch.equal(whole[key], other[key]) for key in whole)
    (tmp_path / "head.training").write_bytes(b"cut")
    again = fitted("medusa", tmp_path, seed=1)
    assert all(torch.equal(whole[key], again[key]) for key in whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRAINED if name not in SLOW_LEARNERS])
def test_training_lowers_the_loss(name, texts, tmp_path):
    curves: list[Figure] = []

    def watch(event):
        curves.extend([event] if isinstance(event, Figure) else [])

    fit_head(find(name), Fitting(pair().target, tmp_path / "head.training", watch=watch, epochs=EPOCHS))
    first, last = (sum(curves[place].data["series"].values()) for place in (0, -1))
    assert last < first


def test_own_texts_carry_the_librarys_states(texts, tmp_path):
    lessons = OwnTexts("medusa", pair().target, (1, 3), texts, 0, tmp_path / "none")
    batch = next(iter(lessons.batches(0)))
    with torch.no_grad():
        expected = network("llama")(input_ids=batch.ids, output_hidden_states=True, use_cache=False).hidden_states
    for layer in (1, 3):
        assert (batch.states[layer] - expected[layer]).abs().max() < 0.02  # kept in float16
    assert batch.written.tolist() == [[place >= 4 for place in range(14)]] * len(batch.ids)


def test_held_out_texts_are_not_trained_on(texts, tmp_path):
    lessons = OwnTexts("medusa", pair().target, (3,), texts, 0, tmp_path / "none")
    def seen(batches):
        return {tuple(ids) for batch in batches for ids in batch.ids.tolist()}
    held, used = seen(lessons.held_out()), seen(lessons.batches(0))
    assert held and used and not held & used


# --- the target's texts ---

PROMPTS = [[3 + i, 40, 9 + i % 3] for i in range(9)]


@pytest.fixture
def few_prompts(monkeypatch):
    monkeypatch.setattr(target_texts, "world_prompts", lambda *given: PROMPTS)
    monkeypatch.setattr(target_texts, "ROOM", 8)
    monkeypatch.setattr(target_texts, "TOGETHER", 4)


def test_every_second_text_is_greedy(few_prompts):
    written = target_texts.target_texts(pair().target, [], 0)
    assert [text.tokens[:text.start] for text in written] == PROMPTS
    library = network("llama")
    for text in written[::2]:
        with torch.no_grad():
            logits = library(input_ids=torch.tensor([text.tokens]), use_cache=False).logits[0]
        assert text.tokens[text.start:] == logits[text.start - 1:-1].argmax(-1).tolist()


def test_texts_are_written_once_and_an_interrupted_run_goes_on(few_prompts, home):
    whole = target_texts.target_texts(pair().target, [], 0)
    (path,) = (home / "fitted").glob("texts-*.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:5])  # cut off within a line
    before = []
    assert target_texts.target_texts(pair().target, [], 0, lambda share, text: before.append(text)) == whole
    assert len(before) == len(PROMPTS) - 4
    assert target_texts.target_texts(pair().target, [], 0, lambda share, text: before.append("again")) == whole
    assert "again" not in before


def test_too_few_texts_are_refused(few_prompts, tmp_path):
    with pytest.raises(Refusal, match="9 texts are too few"):
        fit_head(find("medusa"), Fitting(pair().target, tmp_path / "x"))


# --- the command, and a lane with what it made ---

@pytest.mark.slow
def test_the_command_fits_a_head_that_lanes_of_this_model_then_find(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(target_texts, "ROOM", 6)
    saved = save_models(tmp_path / "models").target
    (tmp_path / "text.txt").write_text("the green bird sat on a wall. " * 100)
    texts = [str(tmp_path / "text.txt")]
    monkeypatch.setattr(target_texts, "openings", lambda model, given: [[5, 6, 7 + i] for i in range(24)])
    assert main(["fit", "eagle_2", "--model", saved, "--texts", *texts, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["strategy"] == "eagle" and list(facts["models"]) == ["target"]
    import playground
    models = playground.load(saved, playground.NO_DRAFT)
    for name in ("eagle", "eagle_2"):
        session, _ = recorded(speculative_lane(name, "greedy_match"), models, 12)
        plain, _ = recorded(speculative_lane("prompt_lookup", "greedy_match"), models, 12)
        assert session._runners[0].lane.tokens == plain._runners[0].lane.tokens


def test_a_head_that_was_not_fitted_is_refused_with_the_command_that_fits_it():
    _, events = recorded(speculative_lane("eagle_2", "greedy_match"), Models(pair().target))
    assert "run `python -m playground fit eagle` with these models" in events[-1].message
