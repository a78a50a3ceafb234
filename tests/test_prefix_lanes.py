"""Lanes of a session share the prefill of a common prompt."""
from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from pairs import pair
from tables import TableModel

import playground
from playground.contract import Decoder, make
from playground.contract.lane_config import LaneConfig
from playground.decoding import shared_prefix as prefixes
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session, prepare
from playground.decoding.stream import forwards
from playground.engine.attention import segment_attention
from playground.engine.cache.kv_cache import KVCache
from playground.engine.model import Model
from playground.events import Cache, Commit, Done, Event, Failed, Forward, Note
from playground.trace import check
from support.sessions import Clock
from support.sessions import side_by_side as decoders
from support.shared_prefixes import plain_mean

# --- lanes of a session ---

PROMPT = "The green bird sings, and the red fox listens."


@pytest.fixture
def once(monkeypatch):
    """Every prompt is cached once, however short."""
    monkeypatch.setattr(prefixes, "STORED_ONCE", 1)


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Silences the log of lanes that fail on purpose."""
    caplog.set_level(logging.CRITICAL, logger="playground.decoding.lane_runner")


def side_by_side(
    *configs: LaneConfig | str, models: Models | None = None, length: int = 8, prompt: Prompt | None = None
) -> Session:
    asked = [LaneConfig(config) if isinstance(config, str) else config for config in configs]
    return prepare(models or pair(), asked, prompt or Prompt(PROMPT), Limits(max_new_tokens=length))


def run(session: Session) -> Session:
    for _ in session:
        pass
    return session


def events_of(session: Session, lane: int, kind: type[Event]) -> list[Event]:
    return [stamped.event for stamped in session.trace.lane(lane).events if isinstance(stamped.event, kind)]


def written(session: Session, lane: int = 0) -> tuple[list[int], list[float]]:
    commits = events_of(session, lane, Commit)
    return [token for commit in commits for token in commit.ids], [
        logprob for commit in commits for logprob in commit.logprobs
    ]


def store_of(session: Session, lane: int, name: str = "target") -> KVCache:
    return session._runners[lane].lane.stream(name).store


def prefills(session: Session, lane: int, name: str = "target") -> list[Forward]:
    return [event for event in events_of(session, lane, Forward) if event.phase == "prefill" and event.stream == name]


def same_as_alone(session: Session, lane: int, alone: Session) -> None:
    """Token by token, with log-probabilities."""
    (ids, logprobs), (expected, theirs) = written(session, lane), written(alone)
    assert ids == expected and isinstance(events_of(session, lane, Done)[-1], Done)
    assert all(a is b is None or abs(a - b) < 1e-8 for a, b in zip(logprobs, theirs, strict=True))


GUESSES = LaneConfig("speculative", extras=[("draft_model", {"depth": 3}), ("greedy_match", {})])
LANES = {
    "greedy": LaneConfig("greedy"),
    "sample": LaneConfig("sample"),
    "guesses": GUESSES,
    "tree": LaneConfig("speculative", extras=[("rsd_s", {}), ("rejection", {})]),
    "beams": LaneConfig("beam_search"),
    "several": LaneConfig("best_of_n"),
    "early exits": LaneConfig("layer_skip"),
    "layers beside": LaneConfig("greedy", extras=[("dola", {})]),
    "copies": LaneConfig("speculative", extras=[("prompt_lookup", {}), ("greedy_match", {})]),
    "at once": LaneConfig("pearl"),
    "blends": LaneConfig("superposed"),
    "turns": LaneConfig("ead"),
    "fork": LaneConfig("greedy", forced=(40, 41, 42)),
    "grammar": LaneConfig("greedy", extras=[("regex", {"pattern": "[a-z ]{12}"})]),
    "instructed": LaneConfig("greedy", extras=[("icd", {})]),
}


@pytest.mark.parametrize("name", LANES)
def test_a_lane_writes_the_same_text_alone_and_with_others(name, once):
    alone, session = run(side_by_side(LANES[name])), run(side_by_side("greedy", LANES[name], LANES[name]))
    assert store_of(session, 0).common > 0, "they have the prompt in common"
    for lane in (1, 2):
        same_as_alone(session, lane, alone)
    assert check(session.trace) == []


def test_a_wrong_merge_changes_what_lanes_write(once, monkeypatch):
    alone = run(side_by_side("greedy"))
    monkeypatch.setattr(segment_attention, "merge", plain_mean)
    assert written(run(side_by_side("greedy", "greedy")))[0] != written(alone)[0]


def test_four_lanes_read_their_prompt_once_and_share_its_cost(once):
    alone, session = run(side_by_side("greedy")), run(side_by_side(*["greedy"] * 4))
    (single,) = prefills(alone, 0)
    shares = [prefills(session, lane) for lane in range(4)]
    assert [(len(share), share[0].readers, share[0].tokens) for share in shares] == [(1, 4, single.tokens)] * 4
    assert sum(share[0].flops for share in shares) == pytest.approx(single.flops) and single.readers == 1
    assert len({share[0].seconds for share in shares}) == 1


def counted_rows(monkeypatch) -> list[int]:
    """Row counts of every forward of any model."""
    rows, forward = [], Model.forward
    monkeypatch.setattr(
        Model,
        "forward",
        lambda self, works, plan=None: (
            rows.append(sum(len(work.tokens) for work in works)) or forward(self, works, plan)
        ),
    )
    return rows


def test_the_model_is_asked_for_the_rows_of_one_prompt(monkeypatch):
    rows = counted_rows(monkeypatch)
    session = run(side_by_side(*["greedy"] * 4, length=3))
    assert rows == [len(session.headers[0].prompt_ids), 4, 4]


def test_shared_memory_is_reported_and_counted_once(once):
    session = run(side_by_side(*["greedy"] * 3))
    last = [events_of(session, lane, Cache)[-1] for lane in range(3)]
    prompt = len(session.headers[0].prompt_ids)
    assert [cache.common for cache in last] == [prompt] * 3
    stores = [store_of(session, lane) for lane in range(3)]
    assert len({store.keys[0].prefix.data_ptr() for store in stores}) == 1
    slot = last[0].common_bytes // prompt
    assert sum(cache.bytes - cache.common_bytes for cache in last) == slot * 3 * (last[0].length - prompt)
    assert [cache.bytes for cache in last] == [events_of(run(side_by_side("greedy")), 0, Cache)[-1].bytes] * 3, (
        "what one lane holds does not depend on the others"
    )


def test_a_lane_with_early_exits_shares_the_prefill_and_reads_one_more_token_if_needed(once):
    looks = LaneConfig("greedy", extras=[("dola", {})])
    for order, commons in (((looks, "greedy"), (0, 0)), (("greedy", looks), (0, 1))):
        session = run(side_by_side(*order))
        prompt = len(session.headers[0].prompt_ids)
        assert [prompt - store_of(session, lane).common for lane in (0, 1)] == list(commons)


def test_a_short_prompt_is_read_once_and_copied():
    session = run(side_by_side("greedy", "greedy"))
    assert [prefills(session, lane)[0].readers for lane in (0, 1)] == [2, 2]
    assert [store_of(session, lane).common for lane in (0, 1)] == [0, 0]
    assert [events_of(session, lane, Cache)[-1].common for lane in (0, 1)] == [0, 0]


def test_drafts_share_it_as_well(once):
    session = run(side_by_side(GUESSES, GUESSES, "greedy"))
    assert [prefills(session, lane, "draft")[0].readers for lane in (0, 1)] == [2, 2]
    assert [prefills(session, lane)[0].readers for lane in range(3)] == [3] * 3
    assert (
        store_of(session, 0, "draft").keys[0].prefix.data_ptr()
        == store_of(session, 1, "draft").keys[0].prefix.data_ptr()
    )
    assert store_of(session, 0, "draft").keys[0].prefix.data_ptr() != store_of(session, 0).keys[0].prefix.data_ptr()


def test_a_prompt_with_an_instruction_is_another_prompt(once):
    """The target shares its prompt with all lanes, the auxiliary stream only with those that have the same instruction.
    """
    lane, other = (
        LaneConfig("greedy", extras=[("icd", {})]),
        LaneConfig("greedy", extras=[("icd", {"instruction": "Answer in one word."})]),
    )
    session = run(side_by_side(lane, lane, other))
    name = next(stream for stream in session._runners[0].lane.prompts if stream != "target")
    assert [prefills(session, each)[0].readers for each in range(3)] == [3] * 3
    assert [prefills(session, each, name)[0].readers for each in range(3)] == [2, 2, 1]
    assert [store_of(session, each, name).common > 0 for each in range(3)] == [True, True, False]


@pytest.mark.parametrize("policy", ["sink_window", "h2o", "kivi", "snapkv", "fastkv", "oracle_keep"])
def test_a_lane_with_a_prompt_policy_has_a_private_prefill(policy, once):
    cut = LaneConfig("greedy", extras=[(policy, {})])
    session = run(side_by_side("greedy", cut, "greedy", cut))
    assert [store_of(session, lane).common > 0 for lane in range(4)] == [True, False, True, False]
    assert {event.readers for event in prefills(session, 1)} == {1} and {
        event.readers for event in prefills(session, 0)
    } == {2}
    same_as_alone(session, 1, run(side_by_side(cut)))
    same_as_alone(session, 0, run(side_by_side("greedy")))


def test_a_single_lane_has_a_private_prefill(once):
    session = run(side_by_side("greedy", LaneConfig("greedy", extras=[("sink_window", {})])))
    assert [store_of(session, lane).common for lane in (0, 1)] == [0, 0]
    assert [event.readers for lane in (0, 1) for event in prefills(session, lane)] == [1, 1]


# --- lanes that stop, fail or start late ---

@pytest.fixture
def pieces(monkeypatch):
    """A prompt is read in chunks of four tokens."""
    monkeypatch.setattr(forwards, "CHUNK", 4)


@pytest.mark.parametrize("parameters, tokens", [(7e6, 512), (1e8, 250), (5e8, 50), (1.7e9, 16), (8e9, 16)])
def test_a_chunk_of_a_prompt_is_about_a_second_of_work_on_a_cpu(parameters, tokens):
    cpu, gpu = (SimpleNamespace(device=torch.device(name), parameters=parameters) for name in ("cpu", "cuda"))
    assert (forwards.chunk_of(cpu), forwards.chunk_of(gpu)) == (tokens, forwards.CHUNK)


def test_a_large_network_reads_a_shared_prompt_in_smaller_chunks(once, monkeypatch):
    monkeypatch.setattr(forwards, "SMALLEST_CHUNK", 2)
    monkeypatch.setattr(forwards, "CHUNK_FLOPS", 4.0 * pair().target.parameters)
    session = run(side_by_side("greedy", "greedy"))
    assert {event.tokens for event in prefills(session, 0)} <= {1, 2}


@pytest.mark.parametrize("turns", [1, 4, 5])
def test_a_lane_that_stops_while_the_prompt_is_read_leaves_it_to_the_others(turns, once, pieces):
    session = side_by_side("greedy", "greedy", "greedy")
    for _ in range(turns):
        session.advance()
    assert session.stop(0)[-1].event == Done("stopped")
    run(session)
    for lane in (1, 2):
        same_as_alone(session, lane, run(side_by_side("greedy")))


def test_a_prompt_read_in_pieces_counts_each_of_them_once(once, pieces):
    session = run(side_by_side("greedy", "greedy"))
    tokens = [event.tokens for event in prefills(session, 0)]
    assert sum(tokens) == len(session.headers[0].prompt_ids) and max(tokens) == 4
    assert [event.readers for event in prefills(session, 1)] == [2] * len(tokens)


class ComesSoon(Decoder):
    """Reads a few tokens before it requests its prompt."""

    def decode(self, lm):
        for request in lm.reading([1, 2, 0]):
            assert (yield request).tokens
        rows = yield lm.prefill()
        yield lm.keep(lm.pick(rows))


class ComesLate(Decoder):
    """Reads other tokens for a while before it requests its prompt."""

    def decode(self, lm):
        for request in lm.reading([1, 2, 0] * 100):
            piece = yield request
            assert piece.tokens
        rows = yield lm.prefill()
        while True:
            yield lm.keep(lm.pick(rows))
            rows = yield lm.extend()


def test_a_late_lane_reuses_the_shared_prefill_and_reports_it(once, monkeypatch):
    monkeypatch.setattr("playground.decoding.lane_runner.perf_counter", Clock())
    session = run(decoders(make("greedy"), make("greedy"), ComesLate()))
    (note,) = events_of(session, 2, Note)
    assert note.text.startswith("3 of the 3 prompt tokens of the target were read for another lane")
    assert prefills(session, 2) == [] and [event.readers for event in prefills(session, 0)] == [2]
    assert written(session, 2)[0] == written(session, 0)[0] and store_of(session, 2).common == 3
    assert check(session.trace) == []


def test_a_lane_that_joins_a_prefill_shares_the_rest_and_reports_what_was_read_before(once, pieces):
    session = run(decoders(make("greedy"), ComesSoon(), prompt=[0, 1, 2, 3] * 8))
    first, joined = ([(event.tokens, event.readers) for event in prefills(session, lane)] for lane in (0, 1))
    assert first == [(4, 1)] + 7 * [(4, 2)] and joined == 7 * [(4, 2)]
    (note,) = events_of(session, 1, Note)
    assert note.text.startswith("4 of the 32 prompt tokens of the target were read for another lane")
    assert events_of(session, 0, Note) == []


class Breaks(TableModel):
    """Its first forwards run out of memory."""

    failures = 2

    def forward(self, works, plan=None):
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("no room")
        return super().forward(works, plan)


def test_if_the_shared_prefill_fails_for_some_lanes_the_others_read_it(once):
    session = run(decoders(*[make("greedy") for _ in range(4)], model=Breaks("abcde")))
    assert [type(events_of(session, lane, Event)[-1]) for lane in range(4)] == [Failed, Failed, Done, Done]
    assert [event.readers for event in prefills(session, 3)] == [2] and written(session, 2)[0] == written(session, 3)[0]


# --- the bundled pair ---

@pytest.fixture(scope="module")
def bundled() -> Models:
    return playground.load(device="cpu")


@pytest.mark.slow
def test_the_bundled_pair_shares_long_prompts_without_changing_texts(bundled):
    """In float32, so that the two ways round differently; on 40 tokens of four lanes."""
    asked = Prompt("Tell me a story about Mia and a dragon. " * 30, chat=True)
    configs = [
        LaneConfig("greedy"),
        GUESSES,
        LaneConfig("speculative", extras=[("prompt_lookup", {}), ("greedy_match", {})]),
        LaneConfig("greedy"),
    ]
    session = run(side_by_side(*configs, models=bundled, length=40, prompt=asked))
    assert len(session.headers[0].prompt_ids) > prefixes.STORED_ONCE
    assert [store_of(session, lane).common for lane in range(4)] == [len(session.headers[0].prompt_ids)] * 4
    alone = run(side_by_side("greedy", models=bundled, length=40, prompt=asked))
    assert [written(session, lane)[0] for lane in range(4)] == [written(alone)[0]] * 4
