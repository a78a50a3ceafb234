"""Models with recurrent layers: their states follow text, branches and rejected draft tokens like keys and values.

The oracle is the library's `generate`, which carries the states in its own cache.
"""
from __future__ import annotations

import random
from functools import cache
from unittest.mock import patch

import pytest
import torch
from pairs import TOKENIZER, VOCABULARY
from recurrent_networks import BY_TYPE, recurrent
from runs import alone, run
from transformers import PreTrainedModel

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.logit_lens import look
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.decoding.stream import forwards
from playground.engine.cache.kv_cache import KVCache
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from playground.engine.recurrent import recurrent_layers, recurrent_scan, recurrent_state
from playground.engine.recurrent.recurrent_state import RecurrentMemory
from playground.errors import Refusal
from playground.events import Cache, Commit, Draft, Failed, Forward, Verdict
from playground.trace import check
from playground.trace.cache_contents import contents

TYPES = tuple(BY_TYPE)
HYBRID, PURE, PLAIN_SCAN = "qwen3_next", "mamba2", "mamba"  # the last one cannot continue several rows in one call
ROUNDING = 1e-3  # the library's mixers compute in float32, whatever the model's dtype
PROMPT = [54, 71, 9, 200, 54, 71, 33]


@cache
def model(architecture: str) -> Model:
    return Model(network(architecture), TOKENIZER, architecture)


def network(architecture: str) -> PreTrainedModel:
    return recurrent(architecture, vocab_size=VOCABULARY, tie_word_embeddings=False, eos_token_id=None)


def library(architecture: str, prompt: list[int], length: int, **how) -> list[list[int]]:
    """The text of the library's generate."""
    found = network(architecture).generate(
        torch.tensor([prompt]), max_new_tokens=length, pad_token_id=0, **{"do_sample": False, **how}
    )
    return [row[len(prompt):] for row in found.tolist()]


def written(architecture: str, config: LaneConfig, prompt: list[int] = PROMPT, length: int = 12, **models) -> list[int]:
    return run(config, {"target": model(architecture), **models}, prompt, length)[0].main.written


@torch.inference_mode()
def last_row(architecture: str, text: list[int]) -> torch.Tensor:
    """The library's logits after a text, in one forward."""
    return network(architecture)(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


def feed(store: KVCache, architecture: str, tokens: list[int], parents: list[int]) -> torch.Tensor:
    (rows,), _ = model(architecture).forward([ForwardInput(store, tokens, parents)])
    return rows


def reading(architecture: str, text: list[int]) -> KVCache:
    """A cache that has read a text."""
    store = model(architecture).new_store()
    feed(store, architecture, text, links(len(text)))
    store.commit(len(text) - 1)
    return store


def links(count: int, start: int = -1) -> list[int]:
    return list(range(start, start + count))


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def off(rows: torch.Tensor, expected: torch.Tensor) -> float:
    return float((rows - expected).abs().max())


# --- plain decoding ---


@pytest.mark.parametrize("architecture", TYPES)
def test_a_greedy_lane_writes_what_generate_writes(architecture):
    """From a prompt shorter than the convolutions, and from one that is read in chunks."""
    short, long = PROMPT[:2], words(40)
    assert written(architecture, LaneConfig("greedy"), short) == library(architecture, short, 12)[0]
    with patch.object(forwards, "CHUNK", 24), patch.object(recurrent_layers, "PROMPT", 0):
        assert written(architecture, LaneConfig("greedy"), long) == library(architecture, long, 12)[0]


@pytest.mark.parametrize("architecture, rows", [(HYBRID, [24, 16]), (PLAIN_SCAN, [40])])
def test_a_prompt_takes_one_forward_even_if_layers_continue_a_state_row_by_row(architecture, rows):
    with patch.object(forwards, "CHUNK", 24):
        events = run(LaneConfig("greedy"), {"target": model(architecture)}, words(40), 1)[1]
    assert [event.tokens for event in events if isinstance(event, Forward)] == rows


@pytest.mark.parametrize("architecture", [HYBRID, PURE])
def test_without_their_states_the_layers_give_another_text(architecture):
    model(architecture)  # loaded before the states are lost: it is checked against the library as it is loaded
    with patch.object(recurrent_scan.Scan, "_state", lambda self, place, layer, computed: {}):
        assert written(architecture, LaneConfig("greedy")) != library(architecture, PROMPT, 12)[0]


@pytest.mark.parametrize("architecture", [HYBRID, PURE])
def test_a_sampled_text_comes_from_the_librarys_own_distributions(architecture):
    lane, events = run(LaneConfig("sample"), {"target": model(architecture)}, PROMPT, 8)
    logprobs = [logprob for event in events if isinstance(event, Commit) for logprob in event.logprobs]
    for at, logprob in enumerate(logprobs):
        row = last_row(architecture, PROMPT + lane.main.written[:at]).log_softmax(-1)
        assert abs(float(row[lane.main.written[at]]) - logprob) < ROUNDING


def test_a_constraint_holds_and_leaves_the_probabilities_alone():
    lane, events = run(alone("regex", pattern="[a-c]{6}"), {"target": model(HYBRID)}, PROMPT, 8)
    assert len(lane.text) == 6 and set(lane.text) <= set("abc")
    logprobs = [logprob for event in events if isinstance(event, Commit) for logprob in event.logprobs]
    for at, (token, logprob) in enumerate(zip(lane.main.written, logprobs)):
        if logprob is not None:
            row = last_row(HYBRID, PROMPT + lane.main.written[:at]).log_softmax(-1)
            assert abs(float(row[token]) - logprob) < ROUNDING


@pytest.mark.parametrize("architecture", [HYBRID, PURE])
def test_lanes_that_share_a_prompt_and_forwards_write_what_each_writes_alone(architecture):
    prompt = Prompt("The green bird sings, and the red")
    configs = [LaneConfig("greedy"), LaneConfig("beam_search"), LaneConfig("sample")]
    together = prepare(Models(model(architecture)), configs, prompt, Limits(0, 8))
    found = list(together)
    for index, config in enumerate(configs):
        apart = prepare(Models(model(architecture)), [config], prompt, Limits(0, 8))
        commits = [stamped.event.ids for stamped in apart if isinstance(stamped.event, Commit)]
        assert commits and commits == [s.event.ids for s in found if s.lane == index and isinstance(s.event, Commit)]
    assert not list(check(together.trace))


def test_the_logit_lens_has_every_layer_and_attention_where_there_is_some():
    for architecture, attending in ((HYBRID, [2]), (PURE, [])):
        found = look(model(architecture), PROMPT, chosen=3)
        last = last_row(architecture, PROMPT).softmax(-1)
        assert len(found.layers) == 4 and abs(found.layers[-1].chosen - float(last[3])) < ROUNDING
        assert found.attending == attending and len(found.attention) == len(attending)


# --- trees, forks and searches ---


@pytest.mark.parametrize("architecture", [HYBRID, PURE, PLAIN_SCAN, "falcon_h1", "lfm2", "zaya"])
def test_every_node_of_a_tree_continues_the_state_of_its_own_parent(architecture):
    tokens, parents = [5, 9, 5, 7, 8, 9, 3], [-1, -1, 0, 0, 1, 4, 3]
    paths = [[5], [9], [5, 5], [5, 7], [9, 8], [9, 8, 9], [5, 7, 3]]
    rows = feed(reading(architecture, PROMPT), architecture, tokens, parents)
    for row, path in zip(rows, paths):
        assert off(row, last_row(architecture, PROMPT + path)) < ROUNDING


@pytest.mark.parametrize("architecture", [HYBRID, PURE])
def test_beam_search_finds_the_beams_of_generate(architecture):
    expected = library(architecture, PROMPT, 10, num_beams=4, length_penalty=0.0)[0]
    assert written(architecture, LaneConfig("beam_search", {"beams": 4, "length_exponent": 0.0}), length=10) == expected
    assert expected != library(architecture, PROMPT, 10)[0]


@pytest.mark.parametrize("shared", [True, False])
def test_a_fork_has_a_copy_of_the_state(shared):
    store, fork = reading(HYBRID, PROMPT), model(HYBRID).new_store()
    fork.start_from(store, shared)
    for token in (7, 8, 9):
        feed(fork, HYBRID, [token], [-1])
        fork.commit(0)
    assert off(feed(store, HYBRID, [5], [-1])[0], last_row(HYBRID, [*PROMPT, 5])) < ROUNDING
    assert off(feed(fork, HYBRID, [5], [-1])[0], last_row(HYBRID, [*PROMPT, 7, 8, 9, 5])) < ROUNDING


# --- rejected draft tokens and rollback ---


@pytest.fixture(params=["small states", "large states"])
def size(request, monkeypatch) -> str:
    """Small states are held for every draft token; after large ones the accepted rows are computed again."""
    if request.param == "large states":
        monkeypatch.setattr(recurrent_state, "SNAPSHOTS", 0)
    return request.param


def with_noise(architecture: str, noise: float) -> Model:
    """A draft model that often but not always agrees."""
    draft = network(architecture)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in draft.parameters():
            weights += torch.randn_like(weights) * noise * weights.std(correction=0)
    return Model(draft, TOKENIZER, f"{architecture} with noise")


@pytest.mark.slow
@pytest.mark.parametrize("architecture, noise", [(HYBRID, 0.02), (PLAIN_SCAN, 0.1)])
@pytest.mark.parametrize("drafter, knobs", [("draft_model", {}), ("draft_model", {"width": 2}), ("prompt_lookup", {})])
def test_speculation_writes_the_greedy_text(architecture, noise, drafter, knobs, size):
    config = LaneConfig("speculative", {}, [(drafter, knobs), ("greedy_match", {})])
    lane, events = run(config, {"target": model(architecture), "draft": with_noise(architecture, noise)}, PROMPT, 20)
    assert lane.main.written == library(architecture, PROMPT, 20)[0]
    drafted = [len(event.tokens) for event in events if isinstance(event, Draft)]
    accepted = [len(event.kept) for event in events if isinstance(event, Verdict)]
    assert drafter == "prompt_lookup" or 0 < sum(accepted) < sum(drafted)


@pytest.mark.parametrize("architecture", [HYBRID, PURE, PLAIN_SCAN, "nemotron_h", "lfm2"])
@pytest.mark.parametrize("accepted", [0, 2, 5, 11])
def test_after_a_verdict_only_accepted_draft_tokens_are_in_the_state(architecture, accepted, size):
    store, draft = reading(architecture, PROMPT), words(12)
    feed(store, architecture, draft, links(12))
    store.commit(accepted - 1)
    store.crop_scratch()
    row = feed(store, architecture, [5], [-1])[0]
    expected = last_row(architecture, PROMPT + draft[:accepted] + [5])
    # in nemotron_h the library's calls of several rows, such as the expected one, differ from its decode steps
    assert off(row, expected) < (0.1 if architecture == "nemotron_h" else ROUNDING)


def test_a_state_with_rejected_tokens_is_detected(size):
    store, draft = reading(HYBRID, PROMPT), words(6)
    feed(store, HYBRID, draft, links(6))
    stale = store.recurrent.states[max(store.recurrent.states)]
    store.commit(1)
    store.crop_scratch()
    store.recurrent.states[store.recurrent.tail - 1] = stale
    assert off(feed(store, HYBRID, [5], [-1])[0], last_row(HYBRID, [*PROMPT, *draft[:2], 5])) > 100 * ROUNDING


@pytest.mark.parametrize("count", [1, 4, 12, 30])
def test_a_rollback_restores_the_state_or_rereads_the_text(count):
    text = words(40)
    store = reading(HYBRID, text[:8])
    for token in text[8:]:
        feed(store, HYBRID, [token], [-1])
        store.commit(0)
    store.roll_back(count)
    assert store.length == (0 if count > 30 - 8 else 40 - count)
    rest = text[store.length : 40 - count] + [5]
    assert off(feed(store, HYBRID, rest, links(len(rest)))[-1], last_row(HYBRID, [*text[: 40 - count], 5])) < ROUNDING


def test_a_forward_that_fails_leaves_the_states_as_they_were():
    store, fails = reading(HYBRID, PROMPT), patch.object(RecurrentMemory, "hold", side_effect=RuntimeError)
    with fails, pytest.raises(RuntimeError):
        feed(store, HYBRID, [7, 8], [-1, 0])
    assert off(feed(store, HYBRID, [5], [-1])[0], last_row(HYBRID, [*PROMPT, 5])) < ROUNDING


def test_a_chain_after_a_state_is_computed_as_generate_decodes():
    """In nemotron_h the library's one call over several rows differs from its decode steps by more than rounding."""
    together, apart, draft = reading("nemotron_h", PROMPT), reading("nemotron_h", PROMPT), words(10)
    rows = feed(together, "nemotron_h", draft, links(10))
    for row, token in zip(rows, draft):
        assert off(row, feed(apart, "nemotron_h", [token], [-1])[0]) < 1e-5
        apart.commit(0)


# --- cache policies, sizes and refusals ---


def test_cache_policies_act_on_attention_layers_only():
    roomy, tight = alone("h2o", heavy=32, recent=32), alone("h2o", heavy=4, recent=4)
    assert written(HYBRID, roomy) == library(HYBRID, PROMPT, 12)[0]
    caches = [event for event in run(tight, {"target": model(HYBRID)}, words(20), 8)[1] if isinstance(event, Cache)]
    assert all(cache.layers == 1 for cache in caches), "one of three layers has keys and values"
    *_, live = contents(caches)
    assert all(sum(end - start for start, end in head) <= 8 for head in live[0])


def test_the_size_of_a_cache_includes_its_states():
    short, long = reading(PURE, PROMPT), reading(PURE, words(60))
    conv, recurrent_state = (32 * 2 + 2 * 2 * 8) * 4, 8 * 8 * 8  # channels by width; heads by head size by state size
    assert short.recurrent.state_bytes == long.recurrent.state_bytes == 3 * (conv * 8 + recurrent_state * 4)
    assert short.bytes() == short.state_bytes() > short.recurrent.state_bytes


@pytest.mark.parametrize("architecture, strategy, extra, reason", [
    (HYBRID, "speculative", ("layer_skip_draft", {}), "the states of all tokens"),
    (HYBRID, "speculative", ("del_exit", {}), "the states of all tokens"),
    (HYBRID, "greedy", ("fastkv", {}), "the states of all tokens"),
    (PURE, "greedy", ("h2o", {}), "no attention layers"),
])
def test_what_recurrent_layers_cannot_do_is_refused_before_a_run(architecture, strategy, extra, reason):
    models = Models(model(architecture))  # before the patch: loading compares forwards
    with patch.object(Model, "forward", side_effect=AssertionError):
        session = prepare(models, [LaneConfig(strategy, {}, [extra])], Prompt("a b"), Limits(0, 4))
        (failed,) = [stamped.event for stamped in session]
    assert isinstance(failed, Failed) and reason in failed.message and failed.message.count(". ") == 0


def test_layers_whose_states_are_not_found_are_refused():
    hidden_away = patch.object(recurrent_layers, "_find_mixers", lambda network: [])
    with hidden_away, pytest.raises(Refusal, match="0 of the 2 recurrent states of qwen3_next"):
        Model(network(HYBRID), TOKENIZER, HYBRID)


def test_a_module_that_two_layers_share_is_refused():
    """Its layers would overwrite each other's states."""
    probes = recurrent_layers._find_mixers(network(HYBRID))
    kinds = recurrent_layers._layer_kinds(network(HYBRID))
    both = probes[0]._replace(states=probes[0].states | probes[1].states)
    recurrent_layers._check_found(network(HYBRID), kinds, probes)
    with pytest.raises(Refusal):
        recurrent_layers._check_found(network(HYBRID), kinds, [both])
