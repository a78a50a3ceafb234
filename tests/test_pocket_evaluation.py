"""Measurements of the pocket models, on texts and models with known results."""
import math
import random
from dataclasses import replace

import pytest
import torch

from playground.pocket import architecture as models
from playground.pocket import data
from playground.pocket import tokenizer as tokens
from playground.pocket.cards import draft_acceptance as speculation
from playground.pocket.cards import evaluate
from playground.pocket.cards.card import card, curve, report, table
from playground.pocket.generation import continuations
from playground.pocket.model_roles import ROLES
from playground.pocket.training.train import TrainingPlan, TrainingState
from playground.questions.world import TASKS


def some(task, count=4, seed=3):
    rng = random.Random(seed)
    return [TASKS[task].generate(rng) for _ in range(count)]


@pytest.fixture(scope="module")
def texts():
    return [f" {item.prompt} {item.answer}" for task in TASKS for item in some(task, 40)]


@pytest.fixture(scope="module")
def tokenizer(texts):
    return tokens.train(texts, size=600)


@pytest.fixture(scope="module")
def other_tokenizer(texts):
    """Another vocabulary: fewer tokens, from other texts, and several digits in one."""
    return tokens.train([text[::-1] for text in texts], size=500, digits=tokens.OWN["digits"])


def with_windows(folder, tokenizer):
    """The folder, with validation windows of facts in it."""
    items = iter(some("facts", 300))
    windows = data.Packer(lambda: data._item(tokenizer, lambda: next(items), data.NOTHING)).cut(128, 4)
    folder.mkdir(exist_ok=True)
    windows.save(folder / "valid_facts.npz")
    return folder


@pytest.fixture
def folder(tmp_path, tokenizer):
    return with_windows(tmp_path / "shared", tokenizer)


@pytest.fixture
def model():
    return models.make("nano", 600, seed=3).eval()


@pytest.fixture
def prompts(tokenizer):
    return [tokenizer.decode(tokens.exchange(tokenizer, item)[0]) for item in some("facts")]


# text that is continued

@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_prompts_continued_together_are_continued_as_each_alone(model, temperature):
    prompts = [[9, 8, 7], [11, 12, 13, 14, 15, 16], [20]]
    together = continuations(model.double(), prompts, 6)
    assert together == [continuations(model, [prompt], 6)[0] for prompt in prompts]
    torch.manual_seed(1)
    drawn = continuations(model, prompts, 6, temperature)
    assert (drawn == together) == (temperature == 0)


def test_a_continuation_stops_with_its_end_token(model):
    end = tokens.SPECIALS.index(tokens.END)
    # untrained, it repeats what it read last
    assert continuations(model, [[30, end], [30, 31]], 12) == [[end], [31] * 12]


# draft tokens

@pytest.mark.slow
def test_a_model_drafts_for_itself_perfectly(model, tokenizer, prompts):
    found = speculation.lanes(speculation.in_lanes(model, model, tokenizer), prompts, room=36)
    assert found == {
        str(guesses): dict(acceptance=1, tokens_per_forward=guesses + 1, same=1) for guesses in speculation.GUESSES
    }


@pytest.mark.slow
def test_an_opposite_draft_has_no_accepted_tokens(model, tokenizer, prompts):
    contrary = models.make("nano", 600, seed=3).eval()
    contrary.model.norm.weight.data.neg_()
    found = speculation.lanes(speculation.in_lanes(model, contrary, tokenizer), prompts, room=20)
    assert all(row == dict(acceptance=0, tokens_per_forward=1, same=1) for row in found.values())


@pytest.mark.slow
def test_a_round_in_text_commits_accepted_tokens_plus_one(model, tokenizer, prompts):
    ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    answers = continuations(model, ids, 24)
    found = speculation.in_text(model, (tokenizer, tokenizer), prompts, answers)
    assert found["acceptance"] == 1 and found["tokens_per_forward"] == speculation.IN_TEXT + 1
    wrong = [[7 + 37 * place % 500 for place in range(24)] for _ in answers]        # never the token before it
    assert speculation.in_text(model, (tokenizer, tokenizer), prompts, wrong)["tokens_per_forward"] < 1.5


def test_a_draft_with_another_vocabulary_drafts_in_text(model, tokenizer, other_tokenizer, prompts):
    draft = models.make("nano", 500, seed=4).eval()
    answers = [tokenizer.encode(f" {item.answer}", add_special_tokens=False) for item in some("facts")]
    found = speculation.in_text(draft, (tokenizer, other_tokenizer), prompts, answers)
    assert 0 <= found["acceptance"] < 0.5 and 1 <= found["tokens_per_forward"] < 2


# losses, exits, repetition

def test_losses_and_exits_are_measured_within_documents(model, folder):
    assert evaluate.losses(model, folder)["facts"] == pytest.approx(math.log(600), abs=0.5)
    agreed = evaluate.exits(model, folder)
    assert agreed["mean"] == agreed["facts"] and agreed["mean"][-1] == 1 and len(agreed["mean"]) == 3


def test_an_exit_agrees_where_the_layers_behind_it_do_nothing(model, folder):
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    assert evaluate.exits(model, folder)["mean"][1:] == [1, 1]


def test_repetition_sees_a_loop():
    assert evaluate.repetition(list(range(50))) == 0
    assert evaluate.repetition([1, 2, 3, 4] * 10) > 0.85


def test_distinct_bigrams_and_the_longest_repeat_of_a_text_counted_by_hand():
    assert evaluate.distinct([1, 2, 1, 2, 1]) == 2 / 4
    assert evaluate.longest_repeat([1, 2, 3, 9, 1, 2, 3, 4]) == 3
    assert evaluate.longest_repeat([5, 5, 5, 5]) == 3
    assert evaluate.longest_repeat([1, 2, 3]) == 0


# everything together

@pytest.fixture(scope="module")
def result(tokenizer, other_tokenizer, tmp_path_factory):
    model, other = models.make("nano", 600, seed=3).eval(), models.make("nano", 500, seed=4).eval()
    ours, theirs = (with_windows(tmp_path_factory.mktemp("windows"), t) for t in (tokenizer, other_tokenizer))
    family = evaluate.Family((model, tokenizer), (model, tokenizer), (other, other_tokenizer))
    with pytest.MonkeyPatch.context() as shorter:
        shorter.setattr(evaluate, "TASKS", {name: TASKS[name] for name in ("facts", "records")})
        shorter.setattr(evaluate, "ROOM", dict.fromkeys(TASKS, 6))
        shorter.setattr(evaluate.free_text, "__defaults__", (8,))
        return evaluate.evaluate(family, {"target": ours, "draft": ours, "other-draft": theirs}, count=1)


@pytest.mark.slow
def test_an_evaluation_measures_every_role_task_and_grade(result):
    assert set(result["loss"]) == set(ROLES)
    grades = {f"records, grade {grade}" for grade in TASKS["records"].GRADES}
    assert {"facts", "records", "context_qa, against memory"} | grades <= set(result["tasks"])
    assert (
        set(result["tasks"]["facts"]["guessing"]) == {"3", "5", "8"}
        and "guessing_in_text" in result["tasks"]["records"]
    )
    assert {"distinct_2", "longest_repeat", "repetition", "guessing"} <= set(result["tales"]) & set(result["stories"])


@pytest.mark.slow
def test_a_model_card_reports_measurements_and_training(result, model):
    state = TrainingState(
        step=120, seconds=600, tokens=2_000_000, losses=[(1000, 5.0), (2_000_000, 2.5)], place="2 CPU cores"
    )
    facts = dict(result=result, checksums={"tales.jsonl.gz": "c0ffee"}, plan=TrainingPlan(minutes=10))
    for role in ROLES.values():
        text = card(role, model, state, facts)
        assert (
            f"# {role.published}\n" in text
            and f"--role {role.name}` on 2 CPU cores: 10 minutes, 120 steps" in text
            and "c0ffee" in text
        )
        assert report(result, role.name).strip() in text and "started from random weights" in text
    text = card(ROLES["target"], model, replace(state, earlier=dict(tokens=17_800_000, minutes=95)), facts)
    assert "started from the weights of the previous version (17.8 million tokens, 95 minutes)" in text
    layers = ", ".join(f"{layer} {share:.2f}" for layer, share in enumerate(result["exits"]["mean"]))
    assert layers in text and "| stories |" in text


def test_a_row_of_the_table_is_made_from_measures():
    guessing = {str(n): dict(acceptance=0.8, tokens_per_forward=n / 2) for n in speculation.GUESSES}
    row = dict(score=0.5, right=0.25, tokens=7, words=dict(taught=0.6, kept=0.4), guessing=guessing)
    assert "| facts | 0.50 | 25% | 0.60 / 0.40 | 7 | 0.80 | 1.5 / 2.5 / 4.0 | - |" in table(dict(facts=row))


def test_the_loss_figure_has_a_logarithmic_axis():
    picture = curve([(0, 8.0), (500_000, 4.0), (1_000_000, 2.0)])
    assert picture.startswith("<svg") and "1.0 M tokens" in picture
    points = picture.split('points="')[1].split('"')[0].split()
    (x, top), (_, middle), (right, low) = (map(float, point.split(",")) for point in points)
    assert (x, right) == (40, 630) and middle - top == pytest.approx(low - middle, abs=0.2) and middle > top
