"""FastKV in lanes: cost, cache contents, and other strategies beside it."""
from __future__ import annotations

import pytest
from pairs import TOKENIZER, pair
from registry import title
from tables import write

from playground.contract import Full, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Cache, Done, Failed, Figure, Forward, Note
from support.eviction import PROMPT, Wrong, alone, course, live_positions, models
from support.fastkv_runs import BY_HAND, CAPACITY, KERNEL, KNOBS, WINDOW
from support.layer_cuts import EARLY, TEXT, TREE, layer_tokens, leaning_on_earlier_layers, recorded, with_policy

# --- cost and cache contents ---

@pytest.mark.parametrize("chunk", [128, 7])
@pytest.mark.parametrize(
    "rate, depth, whole", [(0.2, 0.35, 1), (0.5, 0.35, 1), (0.5, 0.7, 2), (1.0, 0.35, 1), (0.2, 1.0, 3)]
)
def test_forwards_report_exactly_the_computed_rows(rate, depth, whole, chunk, monkeypatch):
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", chunk)
    monkeypatch.setattr("playground.decoding.stream.forwards.CHUNK", chunk)
    config = LaneConfig("greedy", {}, [("fastkv", KNOBS | {"rate": rate, "depth": depth})])
    ours, plain = recorded(config, Forward), recorded(LaneConfig("greedy"), Forward)
    prompt = layer_tokens(plain) // 3
    onward = int(prompt * rate) if whole < 3 else prompt
    assert layer_tokens(ours) == prompt * whole + onward * (3 - whole)
    assert {forward.phase for forward in ours if forward.layers == 3 and forward.tokens == 1} == {"decode"}
    if onward < prompt:
        assert sum(forward.flops for forward in ours) < sum(forward.flops for forward in plain)
        figure, = recorded(config, Figure)
        assert figure.data["values"] == [prompt] * whole + [onward] * (3 - whole)
        assert any(f"{layer_tokens(ours)} token-layer computations" in note.text for note in recorded(config, Note))


def test_computed_tokens_and_retained_slots_have_separate_knobs():
    """The rate changes the cost of the prefill and not the cache; the capacity the other way round."""
    def costs(**knobs) -> tuple[int, int]:
        config = LaneConfig("greedy", {}, [("fastkv", KNOBS | knobs)])
        return layer_tokens(recorded(config, Forward)), recorded(config, Cache)[0].bytes

    read, held = costs()
    assert costs(rate=1.0)[0] > read and costs(rate=1.0)[1] == held
    assert costs(capacity=6)[0] == read and costs(capacity=6)[1] < held


@pytest.mark.parametrize("rate, room", [(0.5, 8), (0.5, 11), (0.5, 15), (0.25, 15), (1.0, 22), (0.05, 8)])
def test_each_layer_retains_up_to_its_budget_of_what_it_read(rate, room):
    policy = make("fastkv", **KNOBS | {"rate": rate, "capacity": room})
    _, found = course(alone(policy), models())
    read = max(WINDOW, int(22 * rate))
    assert [[len(head) for head in layer] for layer in found[0]] == [
        [min(room, count)] * 2 for count in (22, read, read)
    ]
    assert policy.expected_share(Full(22, 0, 3, 2, 8, 64)) == pytest.approx(
        sum(len(head) for layer in found[0] for head in layer) / (22 * 6)
    )


@pytest.mark.parametrize("tokens, prompt", [(48, 240), (100, 240), (7, 9), (512, 20), (33, 100)])
def test_a_token_budget_selects_at_least_that_many_tokens(tokens, prompt):
    policy = make("fastkv", **find("fastkv").knobs_for_budget(tokens, prompt))
    assert policy.expected_share(Full(prompt, 0, 6, 2, 8, 32)) * prompt == pytest.approx(min(tokens, prompt))


# --- combinations with other strategies ---

def test_chunked_prefill_equals_a_single_prefill(monkeypatch):
    whole = course(alone(make("fastkv", **KNOBS)), models())
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", 5)
    monkeypatch.setattr("playground.decoding.stream.forwards.CHUNK", 5)
    assert course(alone(make("fastkv", **KNOBS)), models()) == whole


BESIDE = [
    LaneConfig("greedy", {}, [("dola", {})]),
    LaneConfig("greedy", {}, [("knn_lm", {"tokens": 16})]),
    LaneConfig("greedy", {}, [("lol", {})]),
    EARLY,
    TREE,
    LaneConfig("greedy", {}, [("regex", {"pattern": "The bird [a-z ]{6,20}"})]),
    LaneConfig("sample"),
]


@pytest.mark.parametrize("lane", BESIDE, ids=title)
def test_early_exits_hidden_states_and_second_streams_are_unaffected(lane, monkeypatch):
    """In pieces of five tokens, so that what was captured of the last row comes from several forwards; a grammar forces
    its first words.
    """
    monkeypatch.setattr("playground.decoding.stream.prompt_chunks.WATCHED_CHUNK", 5)
    texts = []
    for knobs in ({"rate": 1.0, "capacity": 2048}, KNOBS):
        session = prepare(pair(), [lane, with_policy(lane, "fastkv", **knobs)], Prompt(TEXT), Limits(max_new_tokens=8))
        assert not [stamped.event for stamped in session if isinstance(stamped.event, Failed)]
        texts.append([runner.lane.tokens for runner in session._runners])
    assert texts[0][0] == texts[0][1]
    assert texts[1][0] == texts[0][0] and len(texts[1][1]) > len(session.headers[0].prompt_ids)


@pytest.mark.parametrize("knobs", [{"rate": 1.0}, {"depth": 1.0}], ids=str)
@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_if_all_layers_read_everything_it_is_snapkv(knobs, pooling):
    shared = {"window": WINDOW, "capacity": CAPACITY, "kernel": KERNEL, "pooling": pooling}
    expected = course(alone(make("snapkv", **shared)), models())
    assert course(alone(make("fastkv", **shared, **knobs)), models()) == expected
    assert course(alone(make("fastkv", **shared, rate=0.5)), models()) != expected


def test_a_rejected_draft_token_leaves_no_trace():
    plain = course(alone(make("fastkv", **KNOBS)), models())
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = Wrong()
    assert course(Assembly(decoder, cache_policy=make("fastkv", **KNOBS)), models()) == plain


def test_a_fork_does_not_change_what_is_evicted():
    ids, plain = course(alone(make("fastkv", **KNOBS)), models())
    forked, found = course(alone(make("fastkv", **KNOBS)), models(), forced=tuple(ids[:4]))
    assert forked[:4] == ids[:4]
    early = [
        [[{p for p in head if p < len(PROMPT)} for head in layer] for layer in held[-1]] for held in (found, plain)
    ]
    assert early[0] == early[1]


def test_other_lanes_are_unaffected():
    def texts(*configs: LaneConfig) -> list[tuple]:
        session = prepare(pair(), list(configs), Prompt(TEXT), Limits(max_new_tokens=8))
        assert all(stamped.event.reason == "length" for stamped in session if isinstance(stamped.event, Done))
        return [(runner.lane.tokens, live_positions(runner.lane)) for runner in session._runners]

    configs = [
        LaneConfig("greedy"),
        LaneConfig("greedy", {}, [("fastkv", KNOBS)]),
        TREE,
        with_policy(TREE, "fastkv", **KNOBS | {"rate": 0.25}),
    ]
    assert texts(*configs) == [texts(config)[0] for config in configs]


def test_a_prompt_shorter_than_the_window_is_read_by_all_layers():
    both = [
        write(alone(policy), models(), PROMPT[:2], Limits(0, 6), Draws(0)).tokens
        for policy in (make("fastkv", **KNOBS), make("snapkv"))
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    "knobs, says", [(dict(window=8, capacity=8), "raise capacity above it"), (dict(kernel=4), "take 5")]
)
def test_knobs_that_contradict_each_other_are_refused_in_one_sentence(knobs, says):
    with pytest.raises(Refusal, match=says):
        make("fastkv", **knobs)


def test_a_model_without_split_layers_is_refused_unless_all_layers_read_everything():
    leaning = Models(Model(leaning_on_earlier_layers(), TOKENIZER, "leaning"))
    refused, served = (
        [
            stamped.event
            for stamped in prepare(
                leaning, [LaneConfig("greedy", {}, [("fastkv", {"depth": depth})])], Prompt(TEXT), Limits()
            )
        ][-1]
        for depth in (0.5, 1.0)
    )
    assert isinstance(refused, Failed)
    assert "cannot shorten the prompt for them: remove Part of the prompt for later layers (FastKV)" in refused.message
    assert isinstance(served, Done)


@pytest.mark.parametrize("architecture", [*BY_HAND, "gemma2", "mistral", "qwen3_moe"])
def test_a_model_with_split_layers_is_accepted(architecture):
    assert pair(architecture).target.splits
