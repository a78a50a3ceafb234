"""The contract of every lane: events, caches, endings and combinations."""
from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from functools import cache
from itertools import filterfalse, groupby

import pytest
from pairs import pair
from registry import lanes, title
from tables import TableModel, watch, write

from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.rng import Draws
from playground.decoding.session import Session, prepare
from playground.decoding.stream import Stream
from playground.engine.forward_input import ForwardInput
from playground.events import Done, Event, Forward, Note, event_from_json
from playground.trace import Trace, check
from support.contract_lanes import (
    ALL,
    LENGTH,
    PROMPT,
    commits,
    each_of,
    events,
    ids,
    in_groups,
    prompt_of,
    start,
    timeless,
)
from support.laws import drawing

every_lane = each_of(ALL)
ANSWERING = {name: config for name, config in ALL.items() if find(config.strategy).whole_answers}
GROWING = {name: config for name, config in ALL.items() if name not in ANSWERING}
LENGTHENING = {"read_twice"}  # they read a longer prompt, and are refused where it does not fit
every_growing_lane = each_of(GROWING)
every_answering_lane = each_of(ANSWERING)
every_greedy_lane = each_of({title(config): config for config in lanes("greedy_identical")})


@cache
def _finished(name: str) -> Session:
    session = start(ALL[name])
    deque(session, maxlen=0)
    return session


def finished(config: LaneConfig) -> tuple[Session, list[Event]]:
    """One run of a lane and its events, for all tests that only inspect it."""
    session = _finished(title(config))
    return session, [stamped.event for stamped in session.trace.events]


PROMPT_LENGTH = len(prompt_of(PROMPT).encode(pair().target))


def lane_of(session: Session, index: int = 0) -> Lane:
    return session._runners[index].lane


def text_of(stream: Stream) -> list[int]:
    """The text of a stream: its own prompt and the lane's tokens."""
    return [*stream.prompt, *stream.lane.tokens[stream.lane.prompt_length:]]


def tables(letters: str = "abcde", ends: str = "", context: int = 256) -> dict[str, TableModel]:
    return {
        "target": TableModel(letters, ends, context=context),
        "draft": TableModel(letters, ends, seed=1, context=context),
    }


# --- the events of a lane ---

@every_lane
def test_the_events_of_a_run_are_consistent(config):
    session, recorded = finished(config)
    assert check(session.trace) == []
    assert isinstance(recorded[-1], Done)


@every_lane
def test_commits_alone_rebuild_the_text(config):
    session, recorded = finished(config)
    lane = lane_of(session)
    assert ids(recorded) == lane.tokens[lane.prompt_length:]
    assert len(ids(recorded)) == LENGTH or config in ANSWERING.values() and len(ids(recorded)) < LENGTH
    assert "".join(commit.text for commit in commits(recorded)) == lane.text


@every_lane
def test_events_survive_json(config):
    session, recorded = finished(config)
    for event in recorded:
        assert event_from_json(json.loads(json.dumps(event.to_json(), allow_nan=False))) == event
    again = Trace.from_json(json.loads(json.dumps(session.trace.to_json(), allow_nan=False)))
    assert again.headers == session.trace.headers
    assert [stamped.to_json() for stamped in again.events] == [stamped.to_json() for stamped in session.trace.events]


@every_lane
def test_the_same_seed_gives_the_same_events(config):
    assert timeless(events(start(config))) == timeless(finished(config)[1])


@pytest.mark.matrix
@pytest.mark.parametrize("config", drawing(lanes()), ids=title)
def test_another_seed_writes_another_text(config):
    flat = {"target": TableModel("abcde", spread=0.1), "draft": TableModel("abcde", spread=0.1, seed=1)}
    written = {tuple(write(assemble(config), flat, [0], Limits(seed, 12), Draws(seed)).tokens) for seed in range(4)}
    assert len(written) >= 3  # with few tokens to choose from, accepted drafts may make two alike


@every_lane
def test_every_forward_is_reported(config):
    models = tables()
    recorded = [
        event
        for event in events(start(config, models=Models(*models.values()), text="abcab"))
        if isinstance(event, Forward)
    ]
    for name, model in models.items():
        assert sum(event.stream.startswith("draft") == (name == "draft") for event in recorded) == model.forwards
    # then a forward of the target runs the remaining layers
    leaves_early = any(event.stream == "exit" for event in recorded)
    for event in recorded:
        assert event.seconds >= 0 and event.tokens >= 1 and (event.layers == 1 or leaves_early and event.layers == 0)


@every_lane
def test_the_prefill_is_the_prompt(config):
    recorded = [event for event in finished(config)[1] if isinstance(event, Forward)]
    for stream in {event.stream for event in recorded} - {"exit", "resumed"}:
        phases = [event.phase for event in recorded if event.stream == stream]
        assert phases[0] == "prefill" and "prefill" not in phases[1:]


# --- its caches ---

@every_lane
def test_a_cache_holds_a_prefix_of_the_text(config):
    prompt = [0, 1, 2, 0, 1]
    for lane in watch(assemble(config), tables(), prompt, Limits(2, 12), Draws(2)):
        for stream in lane._streams.values():
            store = stream.store
            assert store.length <= len(text_of(stream))
            if store.length:
                assert store.keys[0].rows[0, :store.length, 0].tolist() == text_of(stream)[:store.length]
                assert store.slots[0].positions.tolist() == [list(range(store.length))]


@every_lane
def test_after_a_commit_no_draft_token_is_cached_and_at_most_the_last_token_is_unread(config):
    generated = 0
    for lane in watch(assemble(config), tables(), [0, 1, 2, 0, 1], Limits(2, 12), Draws(2)):
        if lane.generated > generated:
            generated = lane.generated
            assert all(not stream.store.parents for stream in lane._streams.values())
            assert lane.reason or min(stream.behind() for stream in lane._streams.values()) <= 1


@every_lane
def test_a_cache_equals_that_of_a_fresh_prefill_of_the_text(config):
    session, _ = finished(config)
    for stream in [stream for stream in lane_of(session)._streams.values() if stream.store.length]:
        held, tokens = stream.store, text_of(stream)[:stream.store.length]
        fresh = stream.model.new_store()
        stream.model.forward([ForwardInput(fresh, tokens, list(range(-1, len(tokens) - 1)))])
        for pools, expected in ((held.keys, fresh.keys), (held.values, fresh.values)):
            for ours, theirs in ((pool.rows, other.rows) for pool, other in zip(pools, expected)):
                assert (ours[:, :held.length] - theirs[:, :held.length]).abs().max() < 1e-9


# --- stopping ---

@pytest.mark.slow
@every_lane
def test_a_lane_can_be_stopped_at_every_request_without_affecting_the_model(config):
    models = Models(*tables().values())
    whole, stops = events(start(config, models=models, text="abcab")), 0
    while True:
        session = start(config, models=models, text="abcab")
        for _ in range(stops):
            session.advance()
        if session.finished:
            break
        session.stop()
        recorded = events(session)
        assert recorded[-1] == Done("stopped") and timeless(recorded[:-1]) == timeless(whole[:len(recorded) - 1])
        assert check(session.trace) == []
        stops += 1
    assert stops >= LENGTH / 6
    assert timeless(events(start(config, models=models, text="abcab"))) == timeless(whole)


@pytest.mark.slow
@in_groups(ALL, size=15)
def test_lanes_that_share_a_model_write_what_each_writes_alone(configs):
    """Rows that went through a matrix product together are rounded together, so numbers agree to rounding and tokens
    exactly.
    """
    together = start(*configs, seed=5)
    shared = [event for event in events(together) if isinstance(event, Forward) and event.lanes > 1]
    assert shared, "nobody shared a forward, so this says nothing"
    for i, config in enumerate(configs):
        recorded, alone = (rounded(found) for found in (events(together, i), events(start(config, seed=5))))
        assert recorded == alone, title(config)


def rounded(recorded: list[Event]) -> list:
    """Events without what depends on other lanes, numbers to ten digits.

    The order of concurrent forwards depends on other lanes, and so do the chunks of a shared prompt: forwards that read
    only the prompt, and notes on it, are left out.
    """

    def plain(value):
        if isinstance(value, float):
            return round(value, 10) + 0.0
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if key not in ("seconds", "lanes")}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    runs = groupby(filterfalse(reads_the_prompt, recorded), lambda event: isinstance(event, Forward))
    sorted_runs = (sorted(run, key=lambda event: event.stream) if forwards else run for forwards, run in runs)
    return [plain(event.to_json()) for run in sorted_runs for event in run]


def reads_the_prompt(event: Event) -> bool:
    recorded = isinstance(event, Note) and "prompt tokens" in event.text
    return recorded or isinstance(event, Forward) and event.context <= PROMPT_LENGTH


# --- forks ---

@every_growing_lane
def test_a_fork_begins_with_its_given_tokens_and_reports_them(config):
    given = [70, 71, 72]
    recorded = events(start(replace(config, forced=given)))
    origins = [origin for commit in commits(recorded) for origin in commit.origins]
    assert ids(recorded)[:3] == given and len(ids(recorded)) == LENGTH
    assert origins[:3] == ["forced"] * 3 and "forced" not in origins[3:]


@every_greedy_lane
def test_a_fork_continues_as_if_its_prefix_were_in_the_prompt(config):
    prompt, given, models = [0, 1, 2], [3, 3, 0], tables()
    forked = write(assemble(config), models, prompt, Limits(0, 10, forced=tuple(given)), Draws(0)).tokens
    assert forked == write(assemble(LaneConfig("greedy")), models, prompt + given, Limits(0, 7), Draws(0)).tokens


@every_greedy_lane
def test_a_fork_along_its_own_text_changes_nothing(config):
    models = tables(ends="e")
    text = write(assemble(config), models, [0, 1], Limits(0, 9), Draws(0)).tokens
    for length in range(1, len(text) - 1):
        forced = tuple(text[2:2 + length])
        assert write(assemble(config), models, [0, 1], Limits(0, 9, forced=forced), Draws(0)).tokens == text


@every_lane
def test_a_fork_may_end_the_text_by_itself(config):
    models = tables(ends="e")
    for forced, reason, left in [
        ((1, 4, 2, 2), "end", [1, 4]),
        ((1, 2, 3), "length", [1, 2]),
        ((1, 2, 3), "stop_string", [1, 2]),
    ]:
        limits = Limits(0, 2 if reason == "length" else 9, ("bc",) if reason == "stop_string" else (), forced)
        lane = write(assemble(config), models, [0], limits, Draws(0))
        assert (lane.reason, lane.tokens[1:]) == (reason, left)


# --- how a text ends ---

@every_growing_lane
def test_nothing_follows_an_end_token(config):
    reasons = []
    for seed in range(6):
        models = {"target": TableModel("abcde", "e", seed), "draft": TableModel("abcde", "e", seed + 1)}
        lane = write(assemble(config), models, [0, 1], Limits(seed, 20), Draws(seed))
        written = lane.tokens[2:]
        reasons.append(lane.reason)
        assert 4 not in written[:-1] and (written[-1] == 4) == (lane.reason == "end")
        assert lane.reason == "end" or len(written) == 20
        assert lane.text == "".join("abcd"[token] for token in written if token != 4)
    assert "end" in reasons


@every_growing_lane
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_text_has_the_requested_length(config, length):
    lane = write(assemble(config), tables(), [0, 1], Limits(0, length), Draws(0))
    assert (lane.generated, lane.reason) == (length, "length")


@every_answering_lane
def test_a_whole_answer_has_at_most_the_requested_length_and_follows_its_prefix(config):
    for length in (4, 6):
        lane = write(assemble(config), tables(), [0, 1], Limits(0, length, forced=(2,)), Draws(0))
        assert 1 < lane.generated <= length and lane.reason in ("end", "length") and lane.tokens[:3] == [0, 1, 2]
        assert lane.main.origins == ["forced", *["sampled"] * (lane.generated - 1)]


@every_growing_lane
def test_a_text_never_outgrows_the_context(config):
    for room in (1, 2, 5):
        lane = write(assemble(config), tables(context=6 + room), [0, 1, 2, 3, 0, 1], Limits(0, 50), Draws(0))
        assert (lane.generated, lane.reason) == (room, "length")


@each_of({name: config for name, config in GROWING.items() if config.strategy not in LENGTHENING})
def test_no_forward_exceeds_the_models_positions(config):
    models = pair("gpt2")  # it has an embedding per position and none beyond
    before = len(prompt_of("7").encode(models.target)) - 1
    for room in (1, 4, 9):
        prompt = prompt_of("7" * (models.target.context - room - before))
        recorded = events(prepare(models, [config], prompt, Limits(0, 50)))
        assert isinstance(recorded[-1], Done), recorded[-1]
        assert len(ids(recorded)) == room or recorded[-1].reason == "end"


@every_greedy_lane
def test_a_stop_string_ends_the_text_where_it_ends_greedys(config):
    models, prompt = tables(), [0, 1, 0, 1]
    text = write(assemble(LaneConfig("greedy")), models, prompt, Limits(0, 16), Draws(0)).text
    for begin in range(0, 14, 2):
        limits = Limits(0, 16, ("zz", "", text[begin:begin + 3]))
        plain, lane = (write(assemble(r), models, prompt, limits, Draws(0)) for r in (LaneConfig("greedy"), config))
        assert (lane.text, lane.reason) == (plain.text, "stop_string")
        assert lane.text.endswith(text[begin:begin + 3]) and text[begin:begin + 3] not in lane.text[:-1]


@every_growing_lane
def test_a_stop_string_inside_a_token_ends_the_text_with_that_token(config):
    models = {name: TableModel(["one ", "two ", "three "], seed=seed) for seed, name in enumerate(("target", "draft"))}
    lane = write(assemble(config), models, [0, 1, 2], Limits(1, 30, ("wo", "hre")), Draws(1))
    assert lane.reason == "stop_string" and lane.text.endswith(("two ", "three "))
    assert set(lane.text.split()[:-1]) <= {"one"}
