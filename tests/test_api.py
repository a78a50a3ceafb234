"""The Python interface of the playground."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import playground
from playground.contract.lane_config import LaneConfig
from playground.engine.checkpoint import catalogue, hub_files
from playground.engine.loading.load import Shelf
from playground.engine.model import Model
from support.api_models import PROMPT, models, saved  # noqa: F401

LONE = "\ud800"  # half a character


def is_a_sentence(refusal) -> bool:
    text = str(refusal.value)
    return text.encode() and "\n" not in text and text.endswith((".", "?")) and "Error" not in text


# --- load ---

def test_importing_the_playground_does_not_import_torch():
    code = (
        "import sys, playground; from playground.trace import Trace; "
        "assert not {'torch', 'transformers', 'gradio', 'pandas'} & set(sys.modules)"
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


def test_loading_reports_progress(saved):
    shares = []
    playground.load(saved.target, saved.draft, progress=lambda share, text: shares.append(share))
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1


def test_loads_share_a_model_cache(saved):
    shelf = Shelf(lambda network, tokenizer, facts: Model(network, tokenizer, facts.name))
    first, second = (
        playground.load(saved.target, saved.draft, shelf=shelf),
        playground.load(saved.target, "none", shelf=shelf),
    )
    assert first.target is second.target


def test_a_model_that_is_its_own_draft_is_loaded_once(saved):
    models = playground.load(saved.target, saved.target)
    assert models.target is models.draft


def test_a_model_is_named_by_a_path_and_a_device_and_a_format_by_torchs_objects(saved):
    models = playground.load(Path(saved.target), Path(saved.draft), torch.device("cpu", 0), torch.float64)
    assert models.target.name == saved.target and models.target.dtype == models.draft.dtype == torch.float64


def test_a_path_is_a_folder_even_if_it_reads_like_a_model_or_a_hub_id():
    for path in (Path("pocket"), Path("Qwen/Qwen3-0.6B")):
        with pytest.raises(playground.Refusal, match="There is no folder"):
            playground.load(path)


@pytest.mark.parametrize("name, meant", [("poket", "pocket"), ("Pocket_draft", "pocket-draft")])
def test_a_misspelt_model_is_refused_with_the_closest_name(monkeypatch, name, meant):
    monkeypatch.setattr(hub_files, "HfApi", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(playground.Refusal, match=f"Did you mean {meant}?"):
        playground.load(name)


@pytest.mark.parametrize("draft", ["poket-draft", Path("/nowhere")])
def test_a_missing_draft_is_refused_before_the_target_is_loaded(saved, monkeypatch, draft):
    monkeypatch.setattr(Shelf, "_load", lambda *asked: pytest.fail("a model was loaded"))
    with pytest.raises(playground.Refusal):
        playground.load(saved.target, draft)


@pytest.mark.parametrize("asked", [
    {"model": 3}, {"model": True}, {"draft": 3}, {"device": 0}, {"device": "gpu"}, {"dtype": 32}, {"model": "\ud800"},
    {"draft_device": 1},
])
def test_invalid_models_and_devices_are_refused_in_one_sentence(asked):
    with pytest.raises(playground.Refusal) as refusal:
        playground.load(**asked)
    assert is_a_sentence(refusal)


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


def test_an_extra_may_be_a_plain_name(models):
    result = playground.run(
        "speculative", PROMPT, models=models, extras=["prompt_lookup", "greedy_match"], max_new_tokens=3
    )
    assert [part.name for part in result.header.parts] == ["speculative", "prompt_lookup", "greedy_match"]


def test_a_single_stop_string_need_not_be_in_a_list(models):
    whole = playground.run("greedy", PROMPT, models=models, max_new_tokens=24).text
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=24, stop=whole[8:11])
    assert result.reason == "stop_string" and result.text == whole[:whole.index(whole[8:11])]


def test_no_stop_string_is_none_at_all(models):
    plain, none = (playground.run("greedy", PROMPT, models=models, max_new_tokens=4, stop=stop) for stop in ((), None))
    assert plain.token_ids == none.token_ids and none.header.stop == []


@pytest.mark.slow
def test_messages_are_the_chat_that_system_message_turns_and_prompt_make(models):
    earlier = [{"role": "user", "content": "Who sings?"}, {"role": "assistant", "content": "A bird."}]
    messages = [{"role": "system", "content": "Be brief."}, *earlier, {"role": "user", "content": PROMPT}]
    asked = {"models": models, "max_new_tokens": 3}
    whole = playground.run("greedy", messages, **asked)
    for before in (earlier, [("Who sings?", "A bird.")]):
        parts = playground.run("greedy", PROMPT, chat=True, system="Be brief.", before=before, **asked)
        assert parts.header.prompt_ids == whole.header.prompt_ids and parts.token_ids == whole.token_ids
    assert playground.score(messages, models=models)[0].header.chat


def test_a_json_schema_is_a_text_or_a_dict(models):
    properties = {"ok": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["ok"], "additionalProperties": False}
    texts = [
        playground.run("sample", PROMPT, models=models, extras=[("json_schema", {"source": source})]).text
        for source in (schema, json.dumps(schema))
    ]
    assert texts[0] == texts[1] and json.loads(texts[0]).keys() == {"ok"}


def test_integers_of_numpy_are_whole_numbers(models):
    run = playground.run("sample", PROMPT, models=models, seed=numpy.int64(3), max_new_tokens=numpy.int32(2))
    assert (run.header.seed, run.header.max_new_tokens) == (3, 2) and type(run.header.seed) is int


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
        {"strategy": 3},
        {"strategy": ["greedy"]},
        {"knobs": ["temperature"]},
        {"knobs": {3: 4}},
        {"extras": "top_p"},
        {"extras": {"top_p": {}}},
        {"extras": [3]},
        {"extras": ["adacad"]},
        {"extras": [("top_p", 0.9)]},
        {"extras": [("regex", {"pattern": LONE})]},
        {"extras": [("regex", {"pattern": ["a", "b"]})]},
        {"extras": [("json_schema", {"source": {"type": {1, 2}}})]},
        {"prompt": 3},
        {"prompt": None},
        {"prompt": b"The"},
        {"prompt": ""},
        {"prompt": LONE},
        {"prompt": []},
        {"prompt": ["The"]},
        {"prompt": [{"role": "user"}]},
        {"prompt": [{"role": "judge", "content": "The"}]},
        {"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": [{"role": "user", "content": LONE}]},
        {"prompt": [{"role": "user", "content": "a"}], "system": "b"},
        {"system": 3, "chat": True},
        {"system": "Be brief."},
        {"context": LONE},
        {"before": "ab", "chat": True},
        {"before": ["ab"], "chat": True},
        {"before": [("a", 3)], "chat": True},
        {"before": [("a", LONE)], "chat": True},
        {"before": [("a", "b")]},
        {"before": [{"role": "user", "content": "a"}], "chat": True},
        {"stop": 3},
        {"stop": [3]},
        {"stop": LONE},
        {"seed": "one"},
        {"seed": 0.5},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": 0},
        {"models": "pocket"},
    ],
)
def test_bad_input_is_refused_in_one_sentence_before_a_model_is_loaded(monkeypatch, asked):
    monkeypatch.setattr(playground, "load", lambda: pytest.fail("a model was loaded"))
    with pytest.raises(playground.Refusal) as refusal:
        playground.run(**{"strategy": "greedy", "prompt": PROMPT} | asked)
    assert is_a_sentence(refusal)


def test_a_run_that_cannot_begin_is_refused(models):
    with pytest.raises(playground.Refusal, match="unclosed group"):
        playground.run("greedy", PROMPT, models=models, extras=[("regex", {"pattern": "("})])


@pytest.mark.parametrize("lane", [
    ("sample", {"temperature": 0.5}),
    {"strategy": "sample", "knobs": {"temperature": 0.5}},
    LaneConfig("sample", {"temperature": 0.5}),
], ids=["pair", "dict", "config"])
def test_a_run_takes_a_lane_in_every_form_that_a_comparison_takes(models, lane):
    asked = {"models": models, "seed": 3, "max_new_tokens": 5, "extras": ["no_repeat_ngram"]}
    alone = playground.run(lane, PROMPT, **asked, knobs={"top_k": 9})
    assert alone.token_ids == playground.compare([lane], PROMPT, **asked, knobs={"top_k": 9})[0].token_ids
    [part] = [part for part in alone.header.parts if part.name == "sample"]
    assert part.knobs["temperature"] == 0.5 and part.knobs["top_k"] == 9


@pytest.mark.parametrize(("call", "sentence"), [
    (lambda: playground.run("greedy", PROMPT, max_tokens=5), "no argument 'max_tokens'; did you mean max_new_tokens?"),
    (lambda: playground.compare(["greedy"], PROMPT, model="pocket"), "has no argument 'model'; did you mean mod"),
    (lambda: playground.load(modle="pocket"), "has no argument 'modle'; did you mean model?"),
    (lambda: playground.score("text", zzz=1), "has no argument 'zzz'; its arguments are text, models, chat"),
    (lambda: playground.run("greedy"), "missing a required argument: 'prompt'"),
    (lambda: playground.run("greedy", PROMPT, None, {}), "too many positional arguments"),
])
def test_an_unknown_argument_is_refused_with_the_nearest(call, sentence):
    with pytest.raises(playground.Refusal) as refusal:
        call()
    assert sentence in str(refusal.value) and is_a_sentence(refusal)


def test_results_come_in_the_order_of_the_lanes(models):
    results = playground.compare(
        ["speculative", LaneConfig("greedy"), LaneConfig("sample", {"temperature": 9})],
        PROMPT,
        models=models,
        max_new_tokens=8,
    )
    assert [result.strategy for result in results] == ["speculative", "greedy", "sample"]
    assert results[0].difference(results[1]) is None
    assert [result.reason for result in results] == ["length", "length", "failed"] and "Temperature" in results[
        2
    ].message


def test_a_lane_of_a_comparison_has_all_results_of_a_run(models):
    alone = playground.run("sample", PROMPT, models=models, knobs={"temperature": 1.5}, extras=["epsilon"], seed=5)
    knobs, extras = {"temperature": 1.5}, ["epsilon"]
    lanes = [LaneConfig("sample", knobs, extras, seed=5), {"strategy": "sample", "knobs": knobs, "extras": extras}]
    for lane, seed in zip(lanes, (0, 5)):
        assert playground.compare([lane], PROMPT, models=models, seed=seed)[0].token_ids == alone.token_ids


def test_common_settings_go_to_the_lanes_that_accept_them(models):
    lanes = ["greedy", ("sample", {"temperature": 0.5}), "sample", "speculative"]
    results = playground.compare(
        lanes, PROMPT, models=models, knobs={"temperature": 1.5}, extras=["prompt_lookup"], max_new_tokens=3
    )
    parts = [{part.name: part.knobs for part in result.header.parts} for result in results]
    assert [part["sample"]["temperature"] for part in parts[1:3]] == [0.5, 1.5]
    assert ["prompt_lookup" in part for part in parts] == [False, False, False, True]
    with pytest.raises(playground.Refusal, match="None of greedy has a knob"):
        playground.compare(["greedy"], PROMPT, knobs={"temperature": 1.5})


@pytest.mark.parametrize("lanes", [
    [], "greedy", 3, ["gredy"], ["gredy", "top_p"], [3], [("greedy", 3)], [{"knobs": {}}],
    [{"strategy": "greedy", "x": 1}], [{"strategy": "greedy", "seed": "one"}],
    [{"strategy": "greedy", "forced": "abc"}], [{"strategy": "greedy", "extras": [3]}],
    [LaneConfig("sample", {"temperature": 9})],
])
def test_a_comparison_without_a_lane_that_can_run_is_refused_before_a_model_is_loaded(monkeypatch, lanes):
    monkeypatch.setattr(playground, "load", lambda: pytest.fail("a model was loaded"))
    with pytest.raises(playground.Refusal) as refusal:
        playground.compare(lanes, PROMPT)
    assert is_a_sentence(refusal)


def test_a_comparison_in_which_no_lane_can_start_is_refused(models):
    lanes = [LaneConfig("greedy", forced=[10**6]), LaneConfig("sample", forced=[10**6])]
    with pytest.raises(playground.Refusal, match="use tokens of this model"):
        playground.compare(lanes, PROMPT, models=models)
