"""The playground from Python."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from saved import save_models

import playground
from playground.contract.lane_config import LaneConfig
from playground.engine import catalogue
from playground.engine.load import Shelf
from playground.engine.model import Model
from playground.events import Branches, Commit, Done, Failed, Header, Stamped
from playground.trace import Trace
from playground.trace.result import Result

PROMPT = "The green bird"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def models(saved):
    return playground.load(saved.target, saved.draft, device="cpu")


def trace(*events, stop=()) -> Trace:
    return Trace(
        [Header(strategy="some", stop=list(stop))], [Stamped(0, seq, 0.0, event) for seq, event in enumerate(events)]
    )


# --- load ---

def test_importing_the_playground_takes_no_torch():
    code = (
        "import sys, playground; from playground.trace import Trace; assert not {'torch', 'transformers', 'gradio'} &"
        " set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True, timeout=60)


def test_a_draft_is_the_catalogues_partner_unless_specified_otherwise(saved, monkeypatch):
    monkeypatch.setattr(catalogue, "partner", lambda name: saved.draft if name == saved.target else "")
    assert playground.load(saved.target).draft.name == saved.draft
    assert playground.load(saved.target, "none").draft is None
    assert playground.load(saved.draft).draft is None


def test_a_draft_of_another_vocabulary_is_refused_by_the_lane_that_cannot_translate_it(saved):
    models = playground.load(saved.target, saved.stranger)
    with pytest.raises(playground.Refusal, match="another vocabulary"):
        playground.run("speculative", "The", models=models, max_new_tokens=4)
    assert (
        playground.run("speculative", "The", models=models, max_new_tokens=4, extras=["omnidraft"]).reason == "length"
    )


def test_loading_reports_how_far_it_is(saved):
    shares = []
    playground.load(saved.target, saved.draft, progress=lambda share, text: shares.append(share))
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1


def test_loads_share_a_shelf(saved):
    shelf = Shelf(lambda network, tokenizer, facts: Model(network, tokenizer, facts.name))
    first, second = (
        playground.load(saved.target, saved.draft, shelf=shelf),
        playground.load(saved.target, "none", shelf=shelf),
    )
    assert first.target is second.target


def test_a_model_that_is_its_own_draft_is_held_once(saved):
    models = playground.load(saved.target, saved.target)
    assert models.target is models.draft


# --- run and compare ---

def test_a_run_gives_text_tokens_metrics_and_the_reason(models):
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=10)
    assert result.text == models.target.tokens.decode(result.token_ids) and len(result.token_ids) == 10
    assert result.reason == "length" and result.message == "" and result.metrics["tokens"] == 10
    assert result.outputs == [(result.text, result.token_ids)]


def test_knobs_toggles_chat_and_seed_reach_the_lane(models):
    result = playground.run(
        "sample",
        PROMPT,
        models=models,
        knobs={"temperature": 1.5},
        extras=[("regex", {"pattern": "[a-z]{9}"})],
        chat=True,
        seed=5,
    )
    parts = {part.name: part.knobs for part in result.header.parts}
    assert parts["sample"]["temperature"] == 1.5 and parts["regex"]["pattern"] == "[a-z]{9}"
    assert result.header.chat and result.header.seed == 5 and len(result.text) == 9


def test_an_extra_may_be_a_mere_name(models):
    result = playground.run(
        "speculative", PROMPT, models=models, extras=["prompt_lookup", "greedy_match"], max_new_tokens=3
    )
    assert [part.name for part in result.header.parts] == ["speculative", "prompt_lookup", "greedy_match"]


def test_a_single_stop_string_need_not_be_in_a_list(models):
    whole = playground.run("greedy", PROMPT, models=models, max_new_tokens=24).text
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=24, stop=whole[8:11])
    assert result.reason == "stop_string" and result.text == whole[:whole.index(whole[8:11])]


def test_a_stop_string_cannot_be_empty(models):
    with pytest.raises(playground.Refusal, match="stop string is empty"):
        playground.run("greedy", PROMPT, models=models, stop=["x", ""])


@pytest.mark.parametrize(
    "asked",
    [
        {"strategy": "gredy"},
        {"strategy": "top_p"},
        {"strategy": "sample", "knobs": {"temperature": 9}},
        {"strategy": "greedy", "extras": ["prompt_lookup"]},
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(monkeypatch, asked):
    monkeypatch.setattr(playground, "load", lambda: pytest.fail("a model was loaded"))
    with pytest.raises(playground.Refusal):
        playground.run(prompt=PROMPT, **asked)


def test_a_run_that_cannot_begin_is_refused(models):
    with pytest.raises(playground.Refusal, match="unclosed group"):
        playground.run("greedy", PROMPT, models=models, extras=[("regex", {"pattern": "("})])


def test_results_come_in_the_order_of_the_lanes(models):
    results = playground.compare(
        ["speculative", LaneConfig("greedy"), LaneConfig("sample", {"temperature": 9})],
        PROMPT,
        models=models,
        max_new_tokens=8,
    )
    assert [result.strategy for result in results] == ["speculative", "greedy", "sample"]
    assert results[0].difference(results[1]) is None
    assert [result.reason for result in results] == ["length", "length", "failed"] and "temperature" in results[
        2
    ].message


# --- score ---

def test_a_text_is_scored_by_the_target_and_its_draft(models):
    readings = playground.score(PROMPT, models=models)
    assert [reading.header.model for reading in readings] == [models.target.name, models.draft.name]
    ids = models.target.tokens.encode(PROMPT)
    for reading in readings:
        assert reading.token_ids == ids[-len(reading.token_ids):] and len(reading.logprobs) == len(reading.token_ids)
        assert all(logprob < 0 for logprob in reading.logprobs)


def test_logprobs_are_the_models_own_whatever_chose_the_tokens(models):
    drawn = playground.run(
        "sample", PROMPT, models=models, knobs={"temperature": 0.5, "top_k": 3}, seed=1, max_new_tokens=6
    )
    given = playground.compare([LaneConfig("greedy", forced=drawn.token_ids)], PROMPT, models=models, max_new_tokens=6)[
        0
    ]
    assert given.token_ids == drawn.token_ids and given.logprobs == pytest.approx(drawn.logprobs, abs=1e-4)


def test_a_single_token_cannot_be_scored(models):
    with pytest.raises(playground.Refusal, match="single token"):
        playground.score("T", models=models)


# --- results are made from traces alone ---

def test_a_result_survives_its_traces_file(models, tmp_path):
    result = playground.run("speculative", PROMPT, models=models, max_new_tokens=8)
    result.trace.save(tmp_path / "t.jsonl")
    again = Result(Trace.load(tmp_path / "t.jsonl")).to_json()
    for measured in ("seconds", "tokens_per_second", "time_to_first_token"):  # a file keeps microseconds
        assert again["metrics"].pop(measured) == pytest.approx(result.metrics[measured], abs=1e-2, rel=1e-2)
    assert again == {**result.to_json(), "metrics": {name: result.metrics[name] for name in again["metrics"]}}


def test_several_texts_come_best_first_without_the_dropped():
    result = Result(
        trace(
            Commit(0, [5], ["a"], "a"),
            Branches([(1, 0), (2, 0)]),
            Commit(1, [6], ["b"], "b", sequence=1),
            Commit(1, [7], ["c"], "c", sequence=2),
            Branches([], [2], {0: -2.0, 1: -1.0, 2: -3.0}),
            Done("end"),
        )
    )
    assert result.outputs == [("ab", [5, 6]), ("a", [5])]


def test_text_is_cut_before_the_first_of_several_stop_strings():
    result = Result(trace(Commit(0, [5], ["a. b!"], "a. b!"), Done("stop_string"), stop=["!", "."]))
    assert result.text == "a" and result.token_ids == [5]


@pytest.mark.parametrize("events, reason, message, begun", [
    ([Done("end")], "end", "", True),
    ([Commit(0, [5], ["a"], "a"), Failed("Try again.")], "failed", "Try again.", True),
    ([Failed("Try again.")], "failed", "Try again.", False),
    ([Commit(0, [5], ["a"], "a")], "stopped", "", True),
])
def test_the_last_event_says_why_it_ended(events, reason, message, begun):
    result = Result(trace(*events))
    assert (result.reason, result.message, result.begun) == (reason, message, begun)
