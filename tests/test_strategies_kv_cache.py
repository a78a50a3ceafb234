"""Cache policies: which positions stay live, and when."""
from __future__ import annotations

import pytest
import torch
from pairs import pair
from registry import lanes, title, unchanged_by
from tables import TableModel, watch

from playground.contract import make
from playground.contract.lane_config import Assembly, LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.events import Cache, Commit
from playground.trace.cache_contents import contents
from strategies.kv_cache.sink_window import SinkWindow

COLLAPSES = {"sink_window": unchanged_by("sink_window", window=1024)}


def seen(policy, query: int) -> list[int]:
    return policy.visible(torch.tensor([[query]]), torch.arange(query + 1))[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    "sinks, window, query, positions",
    [
        (2, 3, 9, [0, 1, 7, 8, 9]),
        (2, 3, 3, [0, 1, 2, 3]),
        (0, 1, 5, [5]),
        (4, 1, 9, [0, 1, 2, 3, 9]),
        (0, 3, 9, [7, 8, 9]),
    ],
)
def test_a_row_sees_the_sinks_and_a_window_that_includes_itself(sinks, window, query, positions):
    assert seen(make("sink_window", sinks=sinks, window=window), query) == positions


def written_by_hand(model: TableModel, prompt: list[int], sinks: int, window: int, length: int) -> list[int]:
    """Greedy tokens where the prompt is read in full and every later row sees the sinks and the last tokens alone."""
    text = [*prompt, argmax(model, prompt)]
    while len(text) < len(prompt) + length:
        row = len(text) - 1
        text.append(argmax(model, [token for place, token in enumerate(text) if place < sinks or row - place < window]))
    return text


def argmax(model: TableModel, context: list[int]) -> int:
    scores = model.scores(tuple(context)).tolist()
    return scores.index(max(scores))


def check_sink_window(policy: type[SinkWindow], decoder: str) -> None:
    """Text and live positions of a table model, whose logits depend on all that a row attends to."""
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", spread=3.0)}
    for sinks, window in ((2, 3), (0, 4), (4, 1)):
        assembly = Assembly(make(decoder), cache_policy=policy(sinks=sinks, window=window))
        prompt = [0, 1, 2, 0, 1, 3, 3]
        for lane in watch(assembly, models, prompt, Limits(0, 16), Draws(0)):
            if lane.generated:
                row = len(lane.tokens) - 1
                live = {int(place) for place in lane.target.store.slots[0].positions[0] if place >= 0}
                assert live <= {place for place in range(row) if place < sinks or row - place < window}
        assert lane.tokens == written_by_hand(models["target"], prompt, sinks, window, 16)


class OneTooMany(SinkWindow):
    """The window does not include the current token."""

    def visible(self, query_positions, key_positions):
        return (key_positions < self.sinks) | (query_positions - key_positions <= self.window)


class SinksLeaveToo(SinkWindow):
    def visible(self, query_positions, key_positions):
        return query_positions - key_positions < self.window + self.sinks


class SinksCountFromOne(SinkWindow):
    def visible(self, query_positions, key_positions):
        return (key_positions <= self.sinks) & (key_positions > 0) | (query_positions - key_positions < self.window)


@pytest.mark.oracle("sink_window")
@pytest.mark.parametrize("decoder", ["greedy", "speculative"])
def test_every_row_sees_sinks_and_window_and_nothing_else_is_cached(decoder):
    check_sink_window(SinkWindow, decoder)


@pytest.mark.refuses("sink_window")
@pytest.mark.parametrize("wrong", [OneTooMany, SinksLeaveToo, SinksCountFromOne], ids=lambda cls: cls.__name__)
def test_a_wrong_window_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_sink_window(wrong, "greedy")


def test_evicted_slots_are_reported_and_their_memory_is_freed():
    config = LaneConfig("greedy", {}, [("sink_window", {"sinks": 2, "window": 4})])
    session = prepare(
        pair(), [config], Prompt("The green bird sings, and the red fox listens."), Limits(max_new_tokens=12)
    )
    written, caches = 0, []
    for stamped in session:
        if isinstance(stamped.event, Commit):
            written += len(stamped.event.ids)
        if isinstance(stamped.event, Cache):
            caches.append(stamped.event)
            length = len(session.headers[0].prompt_ids) + max(0, written - 1)
            assert stamped.event.length == length
            *_, live = contents(caches)
            assert live == [[[(0, 2), (length - 3, length)]]]  # and the next row makes four
    # a slot of two heads in three layers
    assert len(caches) == 13 and caches[0].evicted > 0 and all(cache.evicted == 6 for cache in caches[2:])
    assert len({cache.bytes for cache in caches}) == 1


@pytest.mark.parametrize("config", lanes(added=(("sink_window", {"sinks": 1, "window": 3}),)), ids=title)
def test_live_slots_hold_the_text_at_their_positions(config):
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}
    for lane in watch(assemble(config), models, [0, 1, 2, 0, 1], Limits(2, 12), Draws(2)):
        store = lane.target.store
        positions = store.slots[0].positions[0].tolist()
        if store.length:
            assert store.keys[0].rows[0, : len(positions), 0].tolist() == [
                lane.tokens[position] for position in positions
            ]
