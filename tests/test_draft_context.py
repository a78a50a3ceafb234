"""Draft models whose context is shorter than the target's, and what ends a text below the length that was asked for."""
from __future__ import annotations

import pytest
import torch
from toys import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import playground
from playground.cli import main
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Silent
from playground.decoding.session import prepare
from playground.engine.model import Model
from playground.events import Done, Draft, Failed, Note
from playground.trace.result import Result

TOKENIZER = byte_tokenizer()
CONTEXT, SHORT, LENGTH = 96, 24, 40
PROMPT, LONG = "The red fox listens", "The red fox listens, and the green bird sings. " * 2
DRAFTERS = [
    "draft_model", "confidence_stop", "dyspec", "hierarchical", "online_speculative", "rsd_c", "rsd_s", "spectr", "rasd"
]
FULL = "context of the draft model is full"


def model(name: str, context: int, seed: int) -> Model:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, initializer_range=0.2, bos_token_id=None,
        eos_token_id=None,
    )
    network = LlamaForCausalLM(config).to(torch.float64).eval()
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None  # so that a text ends at its length only
    return Model(network, tokenizer, name)


@pytest.fixture(scope="module")
def models() -> Models:
    """The same weights twice, so that every draft token is accepted, with contexts of 96 and 24 tokens."""
    return Models(model("target", CONTEXT, 0), model("short", SHORT, 0))


def run(models: Models, lane: LaneConfig, prompt: str = PROMPT, length: int = LENGTH) -> tuple[Result, list]:
    session = prepare(models, [lane], Prompt(prompt), Limits(0, length))
    events = [stamped.event for stamped in session]
    return Result(session.trace.lane(0)), events


def notes(events: list) -> list[str]:
    return [event.text for event in events if isinstance(event, Note) and FULL in event.text]


def lanes() -> list[LaneConfig]:
    drafting = [LaneConfig("speculative", {}, [(name, {})]) for name in DRAFTERS]
    smartspec, reflective = LaneConfig("smartspec", {"costs": "simulated"}), LaneConfig("reflective", {"alpha": 0.0})
    return [*drafting, LaneConfig("pearl"), smartspec, reflective]


def named(lane: LaneConfig) -> str:
    return "-".join([lane.strategy, *(name for name, _ in lane.extras)])


@pytest.mark.parametrize("lane", lanes(), ids=named)
def test_a_text_goes_on_without_drafts_and_stays_that_of_greedy(models, lane):
    plain = run(models, LaneConfig("greedy"))[0]
    drafted, events = run(models, lane)
    assert drafted.token_ids == plain.token_ids and len(drafted.token_ids) == LENGTH
    assert len(notes(events)) == 1 and any(isinstance(event, Draft) for event in events)
    assert "The context of the draft model is full: the text goes on without drafts" in " ".join(drafted.notes)


@pytest.mark.parametrize("command", ["run", "compare"])
def test_the_shell_says_so_once(models, monkeypatch, capsys, command):
    monkeypatch.setattr(playground, "load", lambda *names, **how: models)
    assert main([command, "speculative", "--prompt", PROMPT, "--max-new-tokens", str(LENGTH)]) == 0
    assert capsys.readouterr().err.count(f"speculative: The {FULL}") == 1


@pytest.mark.parametrize("lane", lanes(), ids=named)
def test_a_prompt_beyond_the_context_of_the_draft_is_continued_without_it(models, lane):
    plain = run(models, LaneConfig("greedy"), LONG, 9)[0]
    drafted, events = run(models, lane, LONG, 9)
    assert plain.header.prompt_ids[SHORT:] and drafted.token_ids == plain.token_ids
    assert len(notes(events)) == 1 and not any(isinstance(event, Draft) for event in events)


def test_a_draft_of_another_vocabulary_is_left_out_when_its_context_is_full():
    target = model("target", CONTEXT, 0)
    lane = LaneConfig("speculative", {}, [("omnidraft", {})])
    short = model("short", SHORT, 1)
    short.tokenizer = short.tokens.tokenizer = byte_tokenizer(merges=20)
    models = Models(target, short)
    assert models.differences
    plain, (drafted, events) = run(models, LaneConfig("greedy"))[0], run(models, lane)
    assert drafted.token_ids == plain.token_ids and len(notes(events)) == 1
    assert run(models, lane, LONG, 5)[0].token_ids == run(models, LaneConfig("greedy"), LONG, 5)[0].token_ids


# --- what ends a text ---


def test_the_length_that_was_asked_for_needs_no_sentence(models):
    assert run(models, LaneConfig("greedy"))[1][-1] == Done("length")


def test_a_text_that_ends_at_the_context_of_the_model_says_so(models):
    result, events = run(models, LaneConfig("greedy"), length=300)
    assert events[-1] == Done("length", "The text ends at 96 tokens, prompt included: target reads at most 96.")
    assert result.message == events[-1].limit and result.to_dict()["message"] == result.message


@pytest.mark.parametrize("strategy", ["contrastive_decoding", "anchored", "ead"])
def test_a_decoder_that_needs_the_draft_for_every_token_names_it(models, strategy):
    result, _ = run(models, LaneConfig(strategy))
    assert (result.reason, len(result.header.prompt_ids) + len(result.token_ids)) == ("length", SHORT)
    assert "the draft model short, which" in result.message and "reads at most 24" in result.message
    failed = run(models, LaneConfig(strategy), LONG, 5)[1][-1]
    assert isinstance(failed, Failed) and "the draft model short" in failed.message


def test_a_longer_prompt_of_the_same_model_is_named():
    target = model("target", CONTEXT, 0)
    session = prepare(
        Models(target),
        [LaneConfig("greedy", {}, [("icd", {"instruction": "An instruction that makes the other prompt long. "})])],
        Prompt(PROMPT), Limits(0, 300),
    )
    last = [stamped.event for stamped in session][-1]
    assert isinstance(last, Done) and "target reads at most 96, and the longest prompt of this lane has" in last.limit


def test_the_draft_model_reads_no_position_beyond_its_context(models):
    lane = LaneConfig("speculative")
    ids, assembly = Prompt(PROMPT).encode(models.target), assemble(lane)
    made = Lane(ids, models.by_stream(assembly), assembly, Limits(0, LENGTH), Silent(models.target.tokens), {})
    runner = Runner(made, assembly)
    while not runner.finished:
        runner.advance()
    assert made.stream("draft").store.length <= SHORT < len(made.tokens)
