"""Forwards of several texts, and forwards launched before their tokens are known, give the rows of eager ones."""
from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.attention.recorded_attention import RecordedAttention
from playground.engine.forward_input import ForwardInput
from playground.engine.graphs.graph_inputs import GraphInputs
from playground.engine.graphs.graph_replay import GraphReplay
from playground.engine.graphs.graph_sizes import PLACES, Bucket
from playground.engine.graphs.launched_ahead import Ahead
from playground.engine.graphs.recorded_reading import RecordedReading
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.engine.row_numbers import row_numbers
from playground.events import Commit
from support.kv_caches import words
from support.recorded_forwards import ENOUGH, Tape, tiny_writer
from support.replayed_forwards import EXACT, Both, distance, pair, small_rooms  # noqa: F401


def feed_together(texts: list[Both], blocks: list[tuple[list[int], list[int]]], plan=None, **how) -> float:
    """One forward of a block of tokens and parents for each text; the largest difference of logits and captures."""
    (logits, captured), (plain, plain_captured) = (
        model.forward([ForwardInput(text.stores[at], *block, **how) for text, block in zip(texts, blocks)], plan)
        for at, model in enumerate(texts[0].models)
    )
    assert captured.keys() == plain_captured.keys()
    pairs = [*zip(logits, plain), *((captured[layer], plain_captured[layer]) for layer in captured)]
    return max(distance(*rows) for rows in pairs)


def wander_together(pair, seed: int, count: int = 5, acts: int = 60) -> float:
    """Random texts that are fed in random company, with random trees, some of which are committed; the largest
    difference.
    """
    chance, texts, worst = random.Random(seed), [Both(pair) for _ in range(count)], 0.0
    for _ in range(acts):
        chosen = chance.sample(texts, chance.randrange(1, 5))
        blocks = []
        for text in chosen:
            held, size = len(text.stores[0].parents), chance.randrange(1, 5)
            blocks.append((words(chance.random(), size),
                           [chance.randrange(-1, held), *(chance.randrange(held, held + i) for i in range(1, size))]))
        worst = max(worst, feed_together(chosen, blocks, expected=chance.choice(["", "best"])))
        for text in chosen:
            text.each("commit", chance.randrange(-1, len(text.stores[0].parents)))
            if text.stores[0].length > 40:
                text.each("roll_back", 20)
    return worst


def test_texts_in_changing_company_have_the_rows_of_eager_forwards(pair, small_rooms):
    assert max(wander_together(pair, seed) for seed in range(4)) < EXACT
    sizes = pair[0].replay.recorded()
    assert {size.places for size in sizes} >= {1, 2, 4} and len({size.slots for size in sizes}) >= 3


def test_four_texts_take_one_forward_of_one_recording(pair):
    texts = [Both(pair).read(5 + i, seed=i) for i in range(4)]
    pair[0].replay.buffers.clear()
    for step in range(6):
        assert feed_together(texts, [([step + 3], [-1])] * 4) < EXACT
        for text in texts:
            text.each("commit", 0)
    (memory,) = pair[0].replay.buffers
    assert pair[0].replay.recorded() == {Bucket(1, memory.slots, 4)}


def test_texts_that_take_turns_stay_where_they_are(pair):
    texts = [Both(pair).read(5, seed=i) for i in range(3)]
    feed_together(texts, [([3], [-1])] * 3)
    (memory,) = {id(m): m for m in pair[0].replay.buffers if m.places == 4 and m.in_use()}.values()
    for text in texts:
        text.each("commit", 0)
        text.feed([4], [-1])
        text.each("commit", 0)
    assert all(memory.holds(text.stores[0]) for text in texts) and all(text.worst < EXACT for text in texts)


def test_a_text_whose_company_has_ended_moves_to_a_place_of_its_own(pair):
    texts = [Both(pair).read(5, seed=i) for i in range(2)]
    feed_together(texts, [([3], [-1])] * 2)
    texts[0].stores[0].done = True
    texts[1].each("commit", 0)
    texts[1].feed([4], [-1])
    (memory,) = [memory for memory in pair[0].replay.buffers if memory.holds(texts[1].stores[0])]
    assert memory.places == 1 and texts[1].worst < EXACT


@pytest.mark.parametrize("layers", [{0}, {1}, {0, 2}, {2}])
def test_captured_states_are_those_of_an_eager_forward(pair, layers):
    texts, plan = [Both(pair).read(4 + i, seed=i) for i in range(2)], LayerPlan(capture=frozenset(layers))
    for blocks in ([([3, 4, 5], [-1, 0, 0]), ([6], [-1])], [([8], [2]), ([9, 9], [0, 1])]):
        assert feed_together(texts, blocks, plan) < EXACT
    assert feed_together(texts[:1], [([8], [-1])], plan) < EXACT


# --- launched ahead ---

def likely_text(text: Both, steps: int, joined: Sequence[Both] = ()) -> list[int]:
    """Continue texts with their most probable tokens; returns how often the inputs were filled by the host."""
    filled, texts = [], [text, *joined]
    right = GraphInputs.fill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphInputs, "fill", lambda inputs, held: (filled.append(held), right(inputs, held)))
        tokens = [3] * len(texts)
        for _ in range(steps):
            (logits, _), (plain, _) = (
                model.forward([ForwardInput(text.stores[at], [token], [-1], expected="best")
                               for text, token in zip(texts, tokens)])
                for at, model in enumerate(text.models)
            )
            text.worst = max(text.worst, *(distance(*rows) for rows in zip(logits, plain)))
            tokens = [int(rows[0].argmax()) for rows in plain]
            for each in texts:
                each.each("commit", 0)
    return [held for held in filled if held]


def test_a_text_of_most_probable_tokens_is_filled_in_by_the_host_once_for_each_buffer(pair, small_rooms):
    text = Both(pair).read(3)
    assert len(likely_text(text, 30)) <= 4 and text.worst < EXACT


def test_texts_side_by_side_are_launched_ahead_together(pair):
    texts = [Both(pair).read(3 + i, seed=i) for i in range(4)]
    assert len(likely_text(texts[0], 20, texts[1:])) == 1 and texts[0].worst < EXACT


def drawn_texts(texts: Sequence[Both], expected: Sequence[str], steps: int = 8) -> int:
    """Continue texts, some of which go on with tokens that only the device is given; returns how many steps were
    launched before their tokens were fed.
    """
    chance, launched, replayed = random.Random(1), 0, texts[0].models[0]
    tokens = [3] * len(texts)
    for _ in range(steps):
        launched += replayed.replay._ahead is not None
        (logits, _), (plain, _) = (
            model.forward([ForwardInput(text.stores[at], [token], [-1], expected=each)
                           for text, token, each in zip(texts, tokens, expected)])
            for at, model in enumerate(texts[0].models)
        )
        texts[0].worst = max(texts[0].worst, *(distance(*rows) for rows in zip(logits, plain)))
        tokens = [int(rows[0].argmax()) if each == "best" else chance.randrange(90)
                  for each, rows in zip(expected, plain)]
        for text, token, each in zip(texts, tokens, expected):
            text.each("commit", 0)
            if each == "drawn":
                replayed.go_on(text.stores[0], torch.tensor([token]))
    return launched


COMPANIES = [["drawn"], ["drawn", "best"], ["best", "drawn", "drawn"]]


@pytest.mark.parametrize("expected", COMPANIES, ids=" ".join)
def test_texts_whose_tokens_are_drawn_on_the_device_are_launched_ahead(pair, expected):
    texts = [Both(pair).read(3 + i, seed=i) for i in range(len(expected))]
    assert drawn_texts(texts, expected) == 7 and texts[0].worst < EXACT


def test_nothing_is_launched_while_one_text_has_not_drawn_its_token(pair):
    texts = [Both(pair).read(3 + i, seed=i) for i in range(2)]
    pair[0].forward([ForwardInput(text.stores[0], [3], [-1], expected="drawn") for text in texts])
    pair[0].go_on(texts[0].stores[0], torch.tensor([5]))
    pair[0].go_on(texts[0].stores[0], torch.tensor([6]))
    assert pair[0].replay._ahead is None
    pair[0].go_on(texts[1].stores[0], torch.tensor([7]))
    assert pair[0].replay._ahead is not None


def test_a_drawn_token_of_an_older_forward_launches_nothing(pair):
    text, other = Both(pair).read(3), Both(pair).read(4)
    pair[0].forward([ForwardInput(text.stores[0], [3], [-1], expected="drawn")])
    other.feed([5], [-1])
    pair[0].go_on(text.stores[0], torch.tensor([7]))
    assert pair[0].replay._ahead is None


def test_without_memory_to_launch_ahead_a_text_goes_on(pair, monkeypatch):
    def no_memory(*arguments):
        raise torch.OutOfMemoryError("none left")

    text = Both(pair).read(6)
    monkeypatch.setattr(pair[0].replay, "_side", no_memory)
    assert drawn_texts([text], ["drawn"]) == 0 and text.worst < EXACT


def test_a_drafted_chain_is_launched_ahead(pair):
    text, token = Both(pair).read(6), 5
    for depth in range(5):
        (rows,), _ = pair[1].forward([ForwardInput(text.stores[1], [token], [depth - 1])])
        (mine,), _ = pair[0].forward([ForwardInput(text.stores[0], [token], [depth - 1], expected="best")])
        assert distance(mine, rows) < EXACT and (depth == 0 or pair[0].replay._ahead)
        token = int(rows[0].argmax())


def of_drawn(text: Both, token: int) -> None:
    """After another token was given to the device."""
    text.feed([5], [-1], expected="drawn")
    text.each("commit", 0)
    text.models[0].go_on(text.stores[0], torch.tensor([(token + 1) % 90]))
    text.feed([token], [-1])


SURPRISES = {
    "another token than was drawn": of_drawn,
    "another token": lambda text, token: text.feed([(token + 1) % 90], [-1]),
    "a block": lambda text, token: text.feed([token, token], [-1, 0]),
    "another capture": lambda text, token: feed_together([text], [([token], [-1])], LayerPlan(capture=frozenset([1]))),
    "a shorter text": lambda text, token: (text.each("roll_back", 2), text.feed([token], [-1])),
    "another text before": lambda text, token: (
        Both(text.models).read(3).feed([token], [-1]), text.feed([token], [-1])),
    "an eager forward before": lambda text, token: (Both(text.models).read(80), text.feed([token], [-1])),
}


@pytest.mark.parametrize("surprise", SURPRISES.values(), ids=SURPRISES)
def test_a_forward_that_was_launched_for_nothing_leaves_no_trace(pair, surprise):
    text = Both(pair).read(6)
    text.feed([7], [-1], expected="best")
    token = int(pair[1].forward([ForwardInput(text.stores[1], [1], [-1])])[0][0].argmax())
    text.stores[1].crop_scratch(1)
    text.each("commit", 0)
    surprise(text, token)
    text.each("commit", 0)
    text.feed([9, 8], [-1, 0])
    assert text.worst < EXACT


def test_lanes_side_by_side_write_what_they_write_alone():
    lanes = [
        LaneConfig("greedy"),
        LaneConfig("speculative", extras=[("prompt_lookup", {}), ("greedy_match", {})]),
        LaneConfig("greedy", extras=[("top_p", {})]),
        LaneConfig("beam_search"),
    ]
    plain, model = tiny_writer(), tiny_writer()
    model.replay = GraphReplay(model.fused, Tape, ENOUGH)
    prompt, limits = Prompt("the red fox, the red fox, the"), Limits(max_new_tokens=24)

    def written(model: Model, lanes: list[LaneConfig]) -> list[list[int]]:
        session = prepare(Models(model), lanes, prompt, limits)
        events = [(stamped.lane, stamped.event) for stamped in session]
        return [[token for at, event in events if at == lane and isinstance(event, Commit) for token in event.ids]
                for lane in range(len(lanes))]

    together = written(model, lanes)
    assert together == [text for lane in lanes for text in written(plain, [lane])] and all(together)
    assert 4 in {size.places for size in model.replay.recorded()}


# --- wrong variants ---

def wrong_advance(stale: str):
    right = GraphInputs.advance

    def advance(inputs, chosen):
        held = getattr(inputs, stale).clone()
        right(inputs, chosen)
        getattr(inputs, stale).copy_(held)
    return advance


@pytest.mark.parametrize("stale", ["ids", "positions", "slots", "seen"])
def test_a_stale_input_of_a_forward_ahead_is_detected(pair, monkeypatch, stale):
    monkeypatch.setattr(GraphInputs, "advance", wrong_advance(stale))
    pair[0].replay.buffers.clear()
    texts = [Both(pair).read(3 + i, seed=i) for i in range(2)]
    likely_text(texts[0], 8, texts[1:])
    pair[0].replay.buffers.clear()
    assert texts[0].worst > 1e-6


def test_a_forward_that_took_another_token_is_detected(pair, monkeypatch):
    right = Ahead.is_of
    monkeypatch.setattr(Ahead, "is_of", lambda ahead, works, segments, chosen: right(
        ahead, works, segments, [works[0].tokens[0]] * PLACES[-1]))
    text = Both(pair).read(6)
    text.feed([7], [-1], expected="best")
    text.each("commit", 0)
    for token in (11, 12):  # one of them was not the most probable token
        text.feed([token], [-1], expected="best")
        text.each("commit", 0)
    pair[0].replay.join()
    assert text.worst > 1e-6


def test_texts_that_see_each_others_slots_are_detected(pair, small_rooms, monkeypatch):
    right = RecordedAttention.__init__
    monkeypatch.setattr(RecordedAttention, "__init__", lambda self, seen: right(self, seen[:1].expand_as(seen)))
    pair[0].replay.buffers.clear()
    found = wander_together(pair, seed=0)
    pair[0].replay.buffers.clear()
    assert found > 1e-6


# --- what the host reads ---

def test_recorded_numbers_of_a_row_are_those_of_the_row():
    read, torch_rows = RecordedReading(Tape), [torch.randn(1, 96, dtype=torch.double) for _ in range(4)]
    first = read(torch_rows[0], 5)
    assert all(torch.equal(read(row, 5), row_numbers(row, 5)) for row in torch_rows[1:])
    assert torch.equal(first, row_numbers(torch_rows[0], 5)), "and stay when the next row is read"


def test_a_row_is_read_without_recording_where_there_is_no_memory_for_one(caplog):
    def no_memory(run):
        tries.append(run)
        raise torch.OutOfMemoryError("CUDA out of memory")

    caplog.set_level("WARNING", logger="playground.engine.graphs.recorded_reading")
    tries, row = [], torch.randn(1, 96)
    read = RecordedReading(no_memory)
    assert all(torch.equal(read(row, 5), row_numbers(row, 5)) for _ in range(3)) and len(tries) == 1
    assert "no memory to record what is read" in caplog.text


def test_numbers_of_a_row_are_entropy_best_token_and_the_most_probable_ones():
    raw = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).double()
    p = [math.exp(score) / sum(map(math.exp, raw[0].tolist())) for score in raw[0].tolist()]
    entropy = -sum(each * math.log(each) for each in p)
    expected = [entropy, 1, 1, 3, p[1], p[3], math.log(p[1]), math.log(p[3])]
    assert row_numbers(raw, 2)[0].tolist() == pytest.approx(expected)
