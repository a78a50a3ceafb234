"""Parallel sequences: each attends to its own past only, and shared slots are stored once."""
from __future__ import annotations

import random

import pytest
import torch
from pairs import network, pair
from tables import TableModel, write

from playground.contract import Decoder, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.rng import Draws
from playground.decoding.session import Session
from playground.events import Branches, Cache, Commit, Done, Failed, Forward, Header
from playground.trace import check
from playground.trace.transcript import sequences

PROMPT = [54, 71, 71, 54, 9]
LENGTH = 10


def session_of(decoder: Decoder, *extras, models=None, limits=None, prompt=PROMPT) -> tuple[Session, Lane]:
    models = models or {"target": pair().target}
    parts = assemble(LaneConfig("greedy", {}, list(extras)))
    assembly = Assembly(decoder, parts.samplers, parts.constraint, parts.cache_policy)
    lane = Lane(prompt, models, assembly, limits or Limits(0, LENGTH), Recorder(models["target"].tokens))
    return Session([Header()], [Runner(lane, assembly)]), lane


def run(session: Session) -> list:
    for _ in session:
        pass
    return [stamped.event for stamped in session.trace.events]


class Several(Decoder):
    """Samples several texts from one prompt, and takes the last."""

    several = True

    def __init__(self, count: int):
        self.count = count

    def decode(self, lm):
        yield lm.prefill()
        leaves = lm.fork(self.count)
        while growing := [leaf for leaf in leaves if not leaf.reason]:
            rows = yield lm.extend(growing)
            yield lm.keep([lm.pick(row) for row in rows])
        yield lm.keep(leaves[-1])


class Wanders(Decoder):
    """Forks, drops and grows at random, and compares every row with a forward over the sequence's whole text."""

    several = True

    def __init__(self, architecture: str, seed: int):
        self.twin, self.chance, self.worst, self.seen = network(architecture), random.Random(seed), 0.0, 0

    def decode(self, lm):
        yield lm.prefill()
        lm.fork(3)
        for _ in range(14):
            leaves = [leaf for leaf in lm.leaves.values() if not leaf.reason]
            rows = yield lm.extend(leaves)
            self.compare(rows)
            yield lm.keep([choice for leaf, row in zip(leaves, rows) for choice in self.continued(lm, leaf, row)])
            while len(lm.leaves) > 5:
                lm.drop([self.chance.choice(list(lm.leaves.values()))])
        yield lm.keep(self.chance.choice(list(lm.leaves.values())))
        while True:
            rows = yield lm.extend()
            self.compare([rows])
            yield lm.keep(lm.pick(rows))

    def continued(self, lm, leaf, row):
        twins = lm.fork(1, leaf) if self.chance.random() < 0.3 else []
        return [lm.choose(row, self.chance.randrange(6), leaf=heir) for heir in [leaf, *twins]]

    def compare(self, rows):
        for row in rows:
            expected = self.twin(input_ids=torch.tensor([row.committed]), use_cache=False).logits[0, -1]
            self.worst, self.seen = max(self.worst, float((row.raw[0] - expected).abs().max())), self.seen + 1


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox", "gpt2"])
def test_every_sequence_attends_to_its_own_past_only(architecture):
    wanderer = Wanders(architecture, seed=5)
    session, _ = session_of(wanderer, models={"target": pair(architecture).target}, limits=Limits(0, 20))
    recorded = run(session)
    assert isinstance(recorded[-1], Done) and check(session.trace) == []
    assert wanderer.seen > 40 and wanderer.worst < 1e-9


def test_two_sequences_that_write_the_same_share_its_slots():
    same = run(session_of(Several(6))[0])  # argmax: all write one text
    assert {event.tokens for event in same if isinstance(event, Forward)} == {len(PROMPT), 1}


def test_the_first_sequence_samples_like_a_single_lane():
    at_one = ("temperature", {"t": 1.0})
    models = {"target": TableModel("abcde")}
    session, lane = session_of(Several(1), at_one, models=models, prompt=[0, 1])
    run(session)
    assert (
        lane.tokens
        == write(assemble(LaneConfig("greedy", {}, [at_one])), models, [0, 1], Limits(0, LENGTH), Draws(0)).tokens
    )


def test_samples_of_a_sequence_do_not_depend_on_their_number():
    texts = {}
    for count in (2, 3, 8):
        session, _ = session_of(
            Several(count), ("temperature", {"t": 1.0}), models={"target": TableModel("abcde")}, prompt=[0, 1]
        )
        run(session)
        texts[count] = [
            [token.id for token in sequences(session.trace.events)[number].tokens] for number in range(1, count + 1)
        ]
    assert texts[2] == texts[3][:2] == texts[8][:2] and texts[3] == texts[8][:3]
    assert len(set(map(tuple, texts[8]))) > 4


def test_shared_slots_are_stored_once_and_freed_when_sequences_end():
    session, lane = session_of(Several(8), ("temperature", {"t": 1.0}), prompt=PROMPT * 12)
    recorded = run(session)
    caches = [event for event in recorded if isinstance(event, Cache)]
    slot = caches[0].bytes / len(PROMPT * 12)
    most = max(event.bytes for event in caches)
    assert most <= slot * (len(PROMPT * 12) + 8 * LENGTH)
    assert caches[-1].bytes <= slot * (len(PROMPT * 12) + LENGTH), "what the others wrote is free"


class DropsAll(Decoder):
    several = True

    def decode(self, lm):
        rows = yield lm.prefill()
        leaves = lm.fork(3)
        rows = yield lm.extend(leaves)
        yield lm.keep([lm.choose(row, token) for token, row in enumerate(rows)])
        yield lm.extend(leaves)
        held = len(lm.target.store.parents)
        lm.drop(leaves[:2])
        assert (held, len(lm.target.store.parents)) == (3, 1)
        lm.drop(leaves)
        assert not lm.target.store.parents
        again = lm.fork(1)
        rows = yield lm.extend(again)  # the row after the prompt is still available
        yield lm.keep([lm.pick(rows[0])])
        yield lm.keep(again[0])


def test_dropped_sequences_leave_nothing_and_the_text_can_be_forked_again():
    session, lane = session_of(DropsAll(), models={"target": TableModel("abcde")}, prompt=[0, 1])
    recorded = run(session)
    assert recorded[-1] == Done("end")
    assert sum(event.phase == "prefill" for event in recorded if isinstance(event, Forward)) == 1
    plain = write(assemble(LaneConfig("greedy")), {"target": TableModel("abcde")}, [0, 1], Limits(0, 1), Draws(0))
    assert lane.tokens == plain.tokens


class ForksOnTheWay(Decoder):
    """Greedy, but every third token and the two after it are written by a separate sequence."""

    several = True

    def decode(self, lm):
        rows = yield lm.prefill()
        while True:
            yield lm.keep(lm.pick(rows))
            leaves = lm.fork(2)
            while not leaves[1].reason and leaves[1].generated % 3:
                rows = yield lm.extend(leaves)
                yield lm.keep([lm.choose(rows[0], 0), lm.pick(rows[1])])
            yield lm.keep(leaves[1])
            rows = yield lm.extend()


@pytest.mark.parametrize("forced", [(), (3, 3), (1, 0, 2)])
def test_the_text_can_be_forked_at_every_token(forced):
    models = {"target": TableModel("abcde")}
    plain = write(assemble(LaneConfig("greedy")), models, [0, 1], Limits(0, 20, forced=forced), Draws(0)).tokens
    assert (
        len(plain) == 22
        and write(Assembly(ForksOnTheWay()), models, [0, 1], Limits(0, 20, forced=forced), Draws(0)).tokens == plain
    )


def test_each_sequence_keeps_its_own_place_in_the_grammar():
    session, _ = session_of(Several(5), ("regex", {"pattern": "(ab|cd|efg){3}"}), ("temperature", {"t": 1.5}))
    run(session)
    texts = {sequences(session.trace.events)[number].text for number in range(1, 6)}
    assert len(texts) > 1
    for text in texts:
        assert set(text) <= set("abcdefg") and text[:2] in ("ab", "cd", "ef")


class KeepsTheMain(Decoder):
    def decode(self, lm):
        rows = yield lm.prefill()
        lm.fork(2)
        yield lm.keep(lm.pick(rows))


class LooksTwice(Decoder):
    def decode(self, lm):
        yield lm.prefill()
        leaves = lm.fork(2)
        rows = yield lm.extend(leaves)
        yield lm.keep([lm.pick(row) for row in rows])
        yield lm.extend(leaves)
        yield lm.extend(leaves)


@pytest.mark.parametrize("decoder, says", [(KeepsTheMain(), "keep one of them"), (LooksTwice(), "keep one first")])
def test_a_strategy_that_mixes_up_its_sequences_gets_a_message(decoder, says, caplog):
    recorded = run(session_of(decoder, models={"target": TableModel("abcde")}, prompt=[0, 1])[0])
    assert isinstance(recorded[-1], Failed) and says in recorded[-1].message


def test_a_text_chosen_from_sequences_is_reported_completely():
    session, lane = session_of(Several(3), ("temperature", {"t": 1.0}))
    recorded = run(session)
    taken = [event for event in recorded if isinstance(event, Commit) and event.grown_on]
    written = sequences(session.trace.events)
    assert len(taken) == 1 and taken[0].grown_on == 3 and taken[0].sequence == 0
    assert [token.id for token in written[0].tokens] == [token.id for token in written[3].tokens] == lane.main.written
    assert [token.logprob for token in written[0].tokens] == [token.logprob for token in written[3].tokens]
    assert any(isinstance(event, Branches) and event.born for event in recorded)


class Remembers(type(make("top_k"))):
    """Counts committed tokens without reporting them."""

    counted = 0

    def observe(self, rows, token, position):
        self.counted += 1
        yield from ()


def test_stateful_samplers_have_a_state_per_sequence():
    decoder = Several(3)
    models = {"target": TableModel("abcde")}
    assembly = Assembly(decoder, [make("temperature", t=1.0), Remembers()])
    lane = Lane([0, 1], models, assembly, Limits(0, 4), Recorder(models["target"].tokens))
    run(Session([Header()], [Runner(lane, assembly)]))
    assert lane.main.chain.samplers[1].counted == 4
