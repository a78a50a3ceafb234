"""Ctrl-C in long commands, what a training prints, and the words of a shell."""
from __future__ import annotations

import json
import re

import pytest

from playground.bench import canvas_filling
from playground.bench.caches import recall_score
from playground.bench.canvas_filling import BASELINE, LANES, Filled, complete
from playground.bench.compute.compute_lanes import entrants
from playground.bench.effects import EFFECTS
from playground.bench.survey.results import answered_by_all
from playground.bench.survey.survey import Answer, Entrant
from playground.cli import parser, remaining_time
from playground.cli.bench.survey import gather
from playground.cli.shell_words import WORDS, in_shell_words
from playground.cli.training.training_view import TrainingView, is_flat
from playground.contract import find
from playground.errors import Refusal
from playground.events import Figure, Note
from playground.lane_fields import LaneConfig
from playground.questions.questions import Question
from playground.training import draft_rollouts, variants
from playground.training.weights import change_weights
from support.shell_runs import PROMPT, ROOT, no_models, pair, saved, shell  # noqa: F401

ABOVE = "stopped; what there was until then is above; run again to begin anew\n"
NOTHING = "stopped; there is nothing to show yet: run again to begin anew\n"
SCHEMA = str(ROOT / "assets/schemas/answer.json")
SMALL = ["--questions", "1", "--max-new-tokens", "4"]


class Interrupted:
    """A progress that raises KeyboardInterrupt at its n-th call, as Ctrl-C does."""

    def __init__(self, at: int):
        self.left = at

    def __call__(self, share: float, text: str, left: float | None = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def interrupt(monkeypatch, at: int) -> None:
    progress = Interrupted(at)
    monkeypatch.setattr(remaining_time.RemainingTime, "__call__", lambda self, *given: progress(*given))


# --- benches ---

BENCHES = {
    "survey": ["--with", "greedy", "sample", "--tasks", "facts", *SMALL],
    "effects": ["--only", "context", "--questions", "2"],
    "caches": ["--parts", "score", "--budgets", "16", "--questions", "1"],
    "compute": ["--only", "ffn_skip", "--tasks", "facts", *SMALL],
    "speculation": ["--only", "prompt_lookup", "--tasks", "facts", *SMALL, "--repeats", "1"],
    "speed": ["--only", "text", "--repeats", "1", "--max-new-tokens", "4", "--no-compile"],
    "diffusion": ["--questions", "1"],
    "parallel": ["--questions", "1"],
    "schemas": [SCHEMA, "--scribbles", "0"],
    "models": ["gpt2"],
    "bookkeeping": ["--quick", "--only", "greedy"],
}


@pytest.mark.slow
@pytest.mark.parametrize("bench", BENCHES)
def test_ctrl_c_before_anything_was_measured_is_one_line(shell, monkeypatch, bench):
    interrupt(monkeypatch, 1)
    code, out, err = shell("bench", bench, *BENCHES[bench])
    assert code == 130 and not out.strip() and err.endswith(NOTHING) and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(("bench", "at", "shown"), [
    ("diffusion", 6, "| one position per forward |"), ("parallel", 12, "## Right answers"),
])
def test_ctrl_c_keeps_the_tasks_that_all_decoders_have_answered(shell, monkeypatch, tmp_path, bench, at, shown):
    monkeypatch.setattr(canvas_filling, "LANES", {name: LANES[name] for name in (BASELINE, "threshold 0.9")})
    monkeypatch.setattr(canvas_filling, "answer", lambda models, task, lane, item: Filled(task, lane, 1., 9, 9, 99, 1.))
    interrupt(monkeypatch, at)
    code, out, err = shell("bench", bench, *BENCHES[bench], "--out", tmp_path / "found.json",
                           "--page", tmp_path / "page.md")
    settings = json.loads((tmp_path / "found.json").read_text())["settings"]
    assert code == 130 and shown in out and err.endswith(ABOVE) and settings["stopped"].startswith("with Ctrl-C after ")
    assert shown in (tmp_path / "page.md").read_text()


@pytest.mark.slow
def test_ctrl_c_shows_the_effects_that_were_measured(shell, pair, monkeypatch, tmp_path):
    first = EFFECTS["context"](seed=1, count=2)
    interrupt(monkeypatch, 1 + len(first.entrants) * len(first.questions) + 2)
    code, out, err = shell("bench", "effects", "--only", "context", "grammar", "--questions", "2", *pair,
                           "--out", tmp_path / "found.json")
    assert code == 130 and "context: " in out and err.endswith(ABOVE)
    assert [effect["name"] for effect in json.loads((tmp_path / "found.json").read_text())["effects"]] == ["context"]


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["compute", "speculation", "caches"])
def test_ctrl_c_keeps_the_questions_that_all_lanes_have_answered(shell, monkeypatch, tmp_path, bench):
    monkeypatch.setattr(recall_score, "policies", lambda only: [find("snapkv")])
    words = [*BENCHES[bench]]
    words[words.index("--questions") + 1] = "2"
    lanes = {"compute": len(entrants(["ffn_skip"])), "speculation": 5, "caches": 2}[bench]
    interrupt(monkeypatch, lanes + 3)  # warming up, one question, and a part of another
    code, out, err = shell("bench", bench, *words, "--out", tmp_path / "found.json", "--page", tmp_path / "page.md")
    assert code == 130 and out and err.endswith(ABOVE), err
    assert json.loads((tmp_path / "found.json").read_text())["settings"]["stopped"].startswith("with Ctrl-C ")


def test_a_question_that_some_lanes_have_not_answered_does_not_count():
    asked = [Question("facts", "p", "a")] * 2
    given = [Answer("a", 0, asked[0], 1, 0), Answer("b", 0, asked[0], 1, 0), Answer("a", 1, asked[1], 1, 0)]
    assert answered_by_all(given, 2) == given[:2] and answered_by_all(given[2:], 2) == []


def test_a_task_that_some_decoders_have_not_answered_does_not_count():
    one = Filled("lists", BASELINE, 1.0, 10, 10, 200, 2.0)
    assert complete([one], 2) == [] and complete([one], 1) == [one]


def test_gathering_keeps_what_there_is():
    def results():
        yield 1
        raise KeyboardInterrupt

    assert gather(found := [], results()) and found == [1]
    with pytest.raises(KeyboardInterrupt, match="nothing to show yet"):
        gather([], (number for number in results() if number > 1))


# --- fit ---

def measurement(step: int, loss: float) -> Figure:
    return Figure("scalar", "training loss", {"x": step, "series": {"loss at depth 1": loss}})


def test_a_training_is_printed_in_columns_under_their_names(capsys):
    view = TrainingView()
    for event in (Note("12 texts."), measurement(0, 3.5), measurement(40, 2.25)):
        view(event)
    assert capsys.readouterr().out.splitlines() == [
        "12 texts.", "training loss", "  step  loss at depth 1", "     0            3.500", "    40            2.250"]


def test_a_flat_loss_is_named_once_with_advice(capsys):
    view = TrainingView(" Fewer --epochs would do.")
    for step, loss in enumerate([3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]):
        view(measurement(step, loss))
    assert capsys.readouterr().out.count("The loss is flat") == 1
    assert not is_flat([3.0, 2.5, 2.0, 1.5, 1.0, 0.5]) and is_flat([1.0] * 6) and not is_flat([1.0] * 5)


def test_fit_says_that_it_was_stopped_and_then_that_it_goes_on(shell, saved, tmp_path, monkeypatch):
    from playground.training import head_fitting
    tales = tmp_path / "tales.txt"
    tales.write_text("The green bird sat on the red fox and slept. " * 200)
    monkeypatch.setattr(head_fitting, "FEW", 1)
    words = ["fit", "medusa", "--model", saved.target, "--texts", tales, "--epochs", "3", "--out", tmp_path / "head"]
    save = head_fitting.OwnTexts.save

    def stop_after_a_pass(texts, state):
        save(texts, state)
        raise KeyboardInterrupt

    monkeypatch.setenv("PLAYGROUND_HOME", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(head_fitting.OwnTexts, "save", stop_after_a_pass)
        code, _, err = shell(*words)
        assert code == 130 and err.endswith("stopped; run again to resume\n")
    code, out, _ = shell(*words)
    assert code == 0 and "Resumed after pass 1 of 3 over the texts." in out and (tmp_path / "head").is_file()


def test_a_training_for_a_pair_goes_on_after_its_finished_rollouts(shell, pair, tmp_path, monkeypatch):
    """It writes what an uninterrupted one writes, and no finished part is made again."""
    tales = tmp_path / "tales.txt"
    tales.write_text("The green bird sat on the red fox and slept. " * 100)
    monkeypatch.setattr(draft_rollouts, "TOGETHER", 2)
    answers, asked = draft_rollouts.answers, []
    monkeypatch.setattr(draft_rollouts, "answers", lambda *given: asked.append(given[1]) or answers(*given))
    words = ["fit", "specdec_plus_plus", *pair, "--texts", tales, "--out"]
    assert shell(*words, tmp_path / "whole")[0] == 0
    parts = len(asked)
    with monkeypatch.context() as patched:
        interrupt(patched, 3)
        code, _, err = shell(*words, tmp_path / "head")
        assert code == 130 and err.endswith("stopped; run again to resume\n")
    assert len(asked) == parts + 2
    assert shell(*words, tmp_path / "head")[0] == 0 and len(asked) == 2 * parts
    assert (tmp_path / "head").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not list(tmp_path.glob("*.training")), "the files of a complete training are deleted"


def test_knobs_that_are_read_off_texts_in_one_go_are_begun_anew(shell, pair, tmp_path, monkeypatch):
    (tales := tmp_path / "tales.txt").write_text("The green bird sat on the red fox and slept. ")
    interrupt(monkeypatch, 1)
    code, _, err = shell("fit", "adadec", *pair[:2], "--texts", tales)
    assert code == 130 and err.endswith("stopped; nothing is kept yet: run again to begin anew\n")


def press(*given):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("name", "where"), [("fastdraft", (variants, "make_variant")),
                                             ("rtn:bits=4", (change_weights.WeightMaker, "make"))])
def test_what_is_made_whole_or_not_at_all_is_begun_anew(shell, saved, monkeypatch, name, where):
    monkeypatch.setattr(*where, press)
    code, _, err = shell("variant", name, "--model", saved.target)
    assert code == 130 and err.endswith("stopped; nothing is kept: run again to begin anew\n"), err


# --- words ---

def test_refusals_advise_with_the_options_of_the_shell(shell, pair):
    code, _, err = shell("run", "greedy", *PROMPT, *pair, "--before", "a", "b")
    assert code == 2 and "add --chat" in err and "turn chat" not in err
    code, _, err = shell("run", "greedy", *PROMPT, *pair, "--with", "adacad")
    assert code == 2 and "give a passage with --context" in err


def test_every_translated_advice_is_one_that_a_refusal_gives():
    sources = " ".join(
        re.sub(r'"\s+f?"', "", path.read_text(encoding="utf-8")) for path in (ROOT / "playground").rglob("*.py")
        if path.name != "shell_words.py"
    )
    assert [phrase for phrase in WORDS if phrase not in sources] == []
    options = {option for name in ("run",) for option in _options(name)}
    assert {word for words in WORDS.values() for word in words.split() if word.startswith("--")} <= options


def _options(command: str) -> set[str]:
    run = parser()._subparsers._group_actions[0].choices[command]
    with pytest.raises(Refusal):
        run.parse_args([])  # which describes it
    return set(run._option_string_actions)


def test_a_sentence_without_advice_for_the_page_stays_as_it_is():
    assert in_shell_words("There is no strategy named 'x'.") == "There is no strategy named 'x'."


# --- one spelling ---

@pytest.mark.parametrize("bench", ["speed", "models", "schemas", "survey", "caches", "compute", "bookkeeping"])
def test_every_bench_writes_its_numbers_with_out(bench):
    words = {"schemas": ["F"], "survey": ["--with", "greedy"]}.get(bench, [])
    assert parser().parse_args(["bench", bench, *words, "--out", "f.json"]).out == "f.json"
    assert parser().parse_args(["bench", bench, *words, "--out"]).out.endswith(".json")
    if bench in ("speed", "models", "schemas"):
        assert parser().parse_args(["bench", bench, *words, "--json", "f.json"]).out == "f.json"


def test_speculative_is_a_lane_of_its_own_benchmark():
    from playground.bench.speculation import speculative_lanes as lanes
    named = lanes.entrants(True, ["speculative"])
    assert named[1:] == [Entrant("speculative", LaneConfig("speculative", {}, [("greedy_match", {})]))]
    assert "speculative" not in [entrant.name for entrant in lanes.entrants(True)]
