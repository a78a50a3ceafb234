"""What the author of a checkpoint stored for generation: ends, processors that are applied, settings that are named."""
from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest
import torch
from toys import ASSISTANT, END, byte_tokenizer
from transformers import AutoModelForCausalLM

import playground
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.text import generation_settings
from playground.engine.text.generation_settings import (
    PROCESSORS,
    GenerationSettings,
    bounds_line,
    end_ids,
    stated_context,
)
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.events import Note
from playground.trace.result import Result
from playground.ui.models.status_line import status
from playground.ui.server.model_loader import ModelLoad
from support.scripted_models import scripted_network, writes
from support.tokenizer_kinds import KINDS

TOKENIZER = byte_tokenizer()
A, B, C, D = (TOKENIZER.encode(letter)[0] for letter in "ABCD")
LAST, NAMED = TOKENIZER.encode(END)[0], TOKENIZER.encode(ASSISTANT)[0]
PROMPT, LENGTH = "The red fox listens", 12
ENTRIES = {
    "sequence_bias": [[[B], -20.0], [[A, C], 9.0]],
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[B], [A, C]],
    "min_length": 12,
    "min_new_tokens": 6,
    "forced_bos_token_id": D,
    "forced_eos_token_id": D,
    "exponential_decay_length_penalty": [2, 1.5],
    "suppress_tokens": list(range(40, 200)),
    "begin_suppress_tokens": list(range(10, 300)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A stored checkpoint, whose generation_config.json tests replace."""
    folder = tmp_path_factory.mktemp("stored")
    torch.manual_seed(5)
    network = scripted_network(len(TOKENIZER), {})
    for name, weights in network.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weights, 0, 0.02)  # so that the text repeats itself
    network.save_pretrained(folder), TOKENIZER.save_pretrained(folder)
    return folder


def both(folder: Path, strategy: str = "greedy", prompt: str = PROMPT, **entries) -> tuple[list, list, Result]:
    """What `generate` writes with these entries, what a lane writes, and the lane."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": LAST, **entries}))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = TOKENIZER(prompt, return_tensors="pt").input_ids
    more = {"tokenizer": TOKENIZER} if "stop_strings" in entries else {}
    text = network.generate(ids, max_new_tokens=LENGTH, do_sample=False, pad_token_id=LAST, **more)[0, ids.shape[1]:]
    models = playground.load(folder, draft=folder, device="cpu", dtype="float32")
    result = playground.run(strategy, prompt, models=models, max_new_tokens=LENGTH)
    return text.tolist(), result.token_ids, result


def test_these_tests_have_a_value_for_every_entry_that_is_applied():
    assert set(ENTRIES) == set(PROCESSORS)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_plain_lane_writes_what_generate_writes_with_each_entry(folder, entry):
    theirs, ours, result = both(folder, **{entry: ENTRIES[entry]})
    assert ours == theirs
    assert "generation_config" in [part.name for part in result.header.parts]


@pytest.mark.parametrize(
    "entry", ["suppress_tokens", "begin_suppress_tokens", "repetition_penalty", "no_repeat_ngram_size"]
)
def test_an_entry_that_was_left_out_would_change_the_text(folder, entry):
    assert both(folder, **{entry: ENTRIES[entry]})[0] != both(folder)[1]


def test_all_entries_together_act_in_the_order_of_the_library(folder):
    entries = {name: value for name, value in ENTRIES.items() if name != "forced_bos_token_id"}
    theirs, ours, _ = both(folder, **entries)
    assert ours == theirs


def test_the_first_token_of_a_prompt_of_one_token_is_forced_as_there(folder):
    theirs, ours, _ = both(folder, prompt="A", forced_bos_token_id=D, begin_suppress_tokens=[B])
    assert ours == theirs and ours[0] == D


@pytest.mark.parametrize("entry", ["suppress_tokens", "repetition_penalty", "no_repeat_ngram_size"])
def test_speculation_stays_identical_to_greedy_under_the_entries(folder, entry):
    theirs, ours, result = both(folder, "speculative", **{entry: ENTRIES[entry]})
    assert ours == theirs and result.metrics["tokens_per_target_forward"] > 1


def test_stop_strings_of_the_author_end_a_text_as_in_the_library(folder):
    strange = [token for token in range(len(TOKENIZER)) if not TOKENIZER.decode([token]).strip().isalpha()]
    plain = both(folder, suppress_tokens=strange)[2]
    stop = TOKENIZER.decode(plain.token_ids[2:4])
    theirs, ours, result = both(folder, suppress_tokens=strange, stop_strings=[stop])
    assert ours == theirs and len(ours) < LENGTH
    assert result.reason == "stop_string" and result.header.stop == [stop]


def test_a_toggle_of_the_lane_takes_the_place_of_the_entry(folder):
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.7}))
    models = playground.load(folder, draft="none", device="cpu", dtype="float32")
    off = playground.run("greedy", PROMPT, models=models, max_new_tokens=LENGTH,
                         extras=[("repetition_penalty", {"penalty": 1.0})])
    assert off.token_ids == both(folder)[1]
    assert "generation_config" not in [part.name for part in off.header.parts]


def test_a_row_of_which_nothing_would_be_left_stays_as_it_is():
    model = writes([A, B, C], suppress_tokens=list(range(len(TOKENIZER))))
    session = prepare(Models(model), [LaneConfig()], Prompt("A"), Limits(0, 2))
    list(session)
    assert Result(session.trace.lane(0)).token_ids == [B, C]


def test_sampling_settings_are_named_with_the_toggles_that_apply_them():
    model = writes([A, B], do_sample=True, temperature=0.6, top_p=0.9, num_beams=1, suppress_tokens=[B])
    assert model.bounds == (
        "a text ends at <|end|>; context 512 tokens; of generation_config.json, suppress_tokens (1) applied; "
        "temperature 0.6, top_p 0.9 not applied (add temperature:t=0.6, top_p:p=0.9)"
    )
    loaded = ModelLoad(models=Models(model))
    loaded.ended.set()
    assert "top_p 0.9 not applied" in status(loaded)
    session = prepare(Models(model), [LaneConfig()], Prompt("A"), Limits(0, 2))
    notes = [one.event.text for one in session if isinstance(one.event, Note)]
    assert any("top_p 0.9 not applied" in note for note in notes)


@pytest.mark.parametrize("entry", ["max_length", "max_new_tokens"])
def test_the_authors_length_is_named_since_that_of_the_run_limits_a_text(entry):
    model = writes([A, B], **{entry: 20})
    assert model.bounds.endswith(f"generation_config.json, {entry} 20 not applied")
    session = prepare(Models(model), [LaneConfig()], Prompt("A"), Limits(0, 2))
    assert not [one for one in session if isinstance(one.event, Note)]  # the visitor chose the run's length


@pytest.mark.parametrize(
    "entry", [{"suppress_tokens": "abc"}, {"bad_words_ids": [["x"]]}, {"no_repeat_ngram_size": "2"}]
)
def test_an_entry_that_cannot_be_applied_is_refused_by_its_name(entry):
    network = scripted_network(len(TOKENIZER), {})
    for name, value in entry.items():
        setattr(network.generation_config, name, value)
    with pytest.raises(Refusal, match=f"{next(iter(entry))} is .* mend this entry"):
        GenerationSettings.of(network)


# --- ends ---


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, None, {LAST}),
        (NAMED, None, {LAST, NAMED}),
        ([NAMED, B], None, {LAST, NAMED, B}),
        (B, NAMED, {LAST, NAMED, B}),
        (None, [NAMED, LAST], {LAST, NAMED}),
        (None, B, {LAST}),  # no special token: the library's own default for another tokenizer
    ],
)
def test_ends_of_tokenizer_config_and_generation_config_all_count(generation, config, ends):
    network = scripted_network(len(TOKENIZER), {})
    network.generation_config.eos_token_id, network.config.eos_token_id = generation, config
    assert end_ids(network, Tokens(TOKENIZER, len(TOKENIZER)), TOKENIZER.eos_token_id) == ends


def test_the_end_of_a_nested_text_config_counts():
    network = scripted_network(len(TOKENIZER), {})
    network.config.get_text_config = lambda decoder=False: type("TextConfig", (), {"eos_token_id": [NAMED]})
    assert NAMED in end_ids(network, Tokens(TOKENIZER, len(TOKENIZER)), None)


@pytest.mark.parametrize("held", ["{", "[]", "[" * 9999])
def test_a_generation_config_that_cannot_be_read_is_refused_since_its_ends_would_be_lost(folder, tmp_path, held):
    copied = Path(copytree(folder, tmp_path / "model"))
    (copied / "generation_config.json").write_text(held)
    with pytest.raises(Refusal, match="The generation_config.json of .* is no JSON object: fetch it again, or remove"):
        playground.load(copied, draft="none", device="cpu")


def test_a_text_ends_at_the_end_of_any_of_them():
    session = prepare(Models(writes([A, B, NAMED, C], eos_token_id=[NAMED])), [LaneConfig()], Prompt("A"), Limits(0, 9))
    list(session)
    result = Result(session.trace.lane(0))
    assert (result.reason, result.token_ids) == ("end", [B, NAMED])


# --- the context ---


@pytest.mark.parametrize(
    ("entries", "context"),
    [({"max_position_embeddings": 64}, 64), ({"max_target_positions": 48}, 48), ({"max_seq_len": 32}, 32), ({}, None)],
)
def test_the_context_is_what_the_config_calls_it(entries, context):
    assert stated_context(SimpleNamespace(**entries)) == context


def test_a_context_that_no_config_names_is_called_a_limit_of_the_playground(monkeypatch):
    model = writes([A, B])
    monkeypatch.setattr(generation_settings, "CONTEXTS", ())
    assert "a limit of the playground, since the config names none" in model.bounds
    model.context = 6
    session = prepare(Models(model), [LaneConfig()], Prompt("A"), Limits(0, 20))
    list(session)
    assert "since its config names no context" in Result(session.trace.lane(0)).message


@pytest.mark.parametrize("kind, asked, said", [("bert", True, True), ("bert", False, False), ("gpt2", True, False)])
def test_spaces_that_the_library_cleans_up_in_whole_texts_are_named(kind, asked, said):
    tokenizer = copy(KINDS[kind]())
    tokenizer.clean_up_tokenization_spaces = asked
    ids = tokenizer("it 's .", add_special_tokens=False)["input_ids"]
    line = bounds_line(frozenset(), Tokens(tokenizer, len(tokenizer)), 512, GenerationSettings())
    assert ("cleans up" in line) == said == (tokenizer.decode(ids) != Tokens(tokenizer, len(tokenizer)).decode(ids))
