"""Cache policies: which positions they leave, and when."""
from __future__ import annotations

import pytest
import torch
from pairs import pair
from registry import Collapse, lanes, title
from tables import TableModel, watch

from playground.contract import make
from playground.contract.lane_config import Recipe, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.decoding.session import Prompt, prepare
from playground.events import Cache, Commit

COLLAPSES = {"sink_window": [Collapse(lane, plain) for lane, plain in zip(lanes(added=(("sink_window", {"window": 1024}),)), lanes())]}


def seen(policy, query: int) -> list[int]:
    return policy.visible(torch.tensor([[query]]), torch.arange(query + 1))[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("sinks, window, query, positions", [
    (2, 3, 9, [0, 1, 7, 8, 9]), (2, 3, 3, [0, 1, 2, 3]), (0, 1, 5, [5]), (4, 1, 9, [0, 1, 2, 3, 9]), (0, 3, 9, [7, 8, 9]),
])
def test_a_row_sees_the_first_tokens_and_the_last_ones_itself_included(sinks, window, query, positions):
    assert seen(make("sink_window", sinks=sinks, window=window), query) == positions


def test_evicted_slots_are_gone_from_the_events_and_from_memory():
    recipe = Recipe("greedy", {}, [("sink_window", {"sinks": 2, "window": 4})])
    session = prepare(pair(), [recipe], Prompt("The green bird sings, and the red fox listens."), Limits(max_new_tokens=12))
    written, caches = 0, []
    for stamped in session:
        if isinstance(stamped.event, Commit):
            written += len(stamped.event.ids)
        if isinstance(stamped.event, Cache):
            caches.append(stamped.event)
            length = len(session.headers[0].prompt_ids) + max(0, written - 1)
            assert stamped.event.length == length
            assert stamped.event.live == [[[(0, 2), (length - 3, length)]]]  # and the next row makes four
    assert len(caches) == 13 and caches[0].evicted > 0 and all(cache.evicted == 6 for cache in caches[2:])  # a slot of two heads in three layers
    assert len({cache.bytes for cache in caches}) == 1


@pytest.mark.parametrize("recipe", lanes(added=(("sink_window", {"sinks": 1, "window": 3}),)), ids=title)
def test_what_stays_in_the_cache_is_the_text_at_those_positions(recipe):
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}
    for lane in watch(assemble(recipe), models, [0, 1, 2, 0, 1], Limits(2, 12), Draws(2)):
        store = lane.target.store
        positions = store.slots[0].positions[0].tolist()
        if store.length:
            assert store.keys[0].rows[0, :len(positions), 0].tolist() == [lane.tokens[position] for position in positions]
