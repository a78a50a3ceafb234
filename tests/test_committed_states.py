"""Hidden states of the committed text: those of a fresh forward, whatever was drafted, rejected or shared before."""
from __future__ import annotations

from collections import deque

import pytest
import torch
from pairs import pair
from tables import watch

from playground.contract import Drafter, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.contract.token_tree import TokenTree
from playground.decoding.committed_states import CommittedStates
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from support.draft_heads import PROMPT, Watching, head, random_weights, states
from support.speculation import speculative_lane

LAYERS = (0, 2, 3)  # of three; the last is the input of the lm_head


class Branching(Drafter):
    """Trees of which at most one path is right: the true next token and others, two levels deep."""

    def __init__(self, truth: list[int]):
        self.truth = truth

    def state_layers(self, depth):
        return LAYERS

    def propose(self, lm, budget):
        yield from ()
        tree, coming = TokenTree("branching"), self.truth[lm.generated:]
        for token in dict.fromkeys([5, *coming[:1], 7]):
            node = tree.add(token)
            for child in dict.fromkeys([9, *coming[1:2]]):
                tree.add(child, node)
        return tree if budget > 1 and len(coming) > 1 else TokenTree("branching")


def lanes(drafter: Drafter, length: int = 16):
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = drafter
    return watch(Assembly(decoder), {"target": pair().target}, PROMPT, Limits(0, length), Draws(0))


def truth() -> list[int]:
    return deque(lanes(Branching([])), maxlen=1).pop().tokens[len(PROMPT):]


def error(lane) -> float:
    """Largest difference from the library's states over the same text; fails unless they cover all that was read."""
    held = lane.target.states
    assert held.length == lane.target.store.length
    expected = states(lane.tokens[:held.length])
    return max(float((held.of(layer) - expected[layer][held.start:]).abs().max()) for layer in LAYERS)


def test_states_are_those_of_a_fresh_forward_after_every_round():
    accepted = 0
    for lane in lanes(Branching(truth())):
        if lane.target.store.length and not lane.target.store.parents:
            assert error(lane) < 1e-9
            accepted = max(accepted, lane.generated)
    assert accepted == 16


def test_keeping_the_states_of_rejected_draft_tokens_is_detected(monkeypatch):
    commit = CommittedStates.commit
    right = truth()
    monkeypatch.setattr(CommittedStates, "commit", lambda self, path: commit(self, [0] * len(path)))
    read = (lane for lane in lanes(Branching(right)) if lane.target.store.length and not lane.target.store.parents)
    errors = [error(lane) for lane in read]
    assert max(errors) > 1e-3


def test_states_start_at_any_position():
    lane = deque(lanes(Branching(truth())), maxlen=1).pop()
    held = lane.target.states
    for start in (0, 3, 9, held.length - 1):
        assert torch.equal(held.of(2, start), held.of(2)[start:])
    assert held.of(2, held.length).shape == (0, 32)


def test_states_are_cut_where_the_text_is():
    lane = deque(lanes(Branching(truth())), maxlen=1).pop()
    held, whole = lane.target.states, lane.target.states.of(2)
    held.crop(11)
    assert held.length == 11 and torch.equal(held.of(2), whole[:11])


def test_a_lane_that_reads_no_states_keeps_none():
    lane = deque(watch(Assembly(make("greedy")), {"target": pair().target}, PROMPT, Limits(0, 4), Draws(0)), maxlen=1)
    assert lane.pop().target.states.length == 0


@pytest.mark.parametrize("first", ["greedy", "head"])
def test_lanes_that_share_a_prompt_share_its_states(first):
    """The head's lane gets them even if a lane that reads none is the first to read the prompt."""
    config = speculative_lane("eagle", "greedy_match", weights="random", nodes=4)
    configs = [LaneConfig("greedy"), config] if first == "greedy" else [config, LaneConfig("greedy")]
    session = prepare(Models(pair().target), configs, Prompt("The green bird sat on the old wall"), Limits(0, 8))
    deque(session, maxlen=0)
    lane = session._runners[configs.index(config)].lane
    held, expected = lane.target.states, states(lane.tokens)
    assert held.start == 0 and held.length >= len(lane.tokens) - 1
    assert (held.of(3) - expected[3][:held.length]).abs().max() < 1e-9


def test_a_head_drafts_alike_after_tokens_were_taken_back():
    """The head's cache drops the rows of a text that has changed since."""
    drafter = Watching(head("eagle_2", random_weights("eagle_2"), nodes=8, depth=3, width=2))

    class TakesBack(make("speculative").__class__):
        def decode(self, lm):
            yield lm.prefill()
            for _ in range(3):
                yield lm.keep(lm.pick((yield lm.extend())))
            yield from drafter.propose(lm, 9)
            yield lm.roll_back(2)
            rows = yield lm.extend()
            yield lm.keep(lm.choose(rows, 77))
            yield from drafter.propose(lm, 9)

    decoder = TakesBack()
    decoder.drafter, decoder.verifier = drafter, make("greedy_match")
    deque(watch(Assembly(decoder), {"target": pair().target}, PROMPT, Limits(0, 20), Draws(0)), maxlen=0)
    after = drafter.proposals[-1]
    fresh = Watching(head("eagle_2", random_weights("eagle_2"), nodes=8, depth=3, width=2))

    class Straight(make("speculative").__class__):
        def decode(self, lm):
            yield lm.prefill()
            for token in after.tokens[len(PROMPT):]:
                yield lm.keep(lm.choose((yield lm.extend()), token))
            yield from fresh.propose(lm, 9)

    decoder = Straight()
    decoder.drafter, decoder.verifier = fresh, make("greedy_match")
    deque(watch(Assembly(decoder), {"target": pair().target}, PROMPT, Limits(0, 20), Draws(0)), maxlen=0)
    assert fresh.proposals[-1].tokens == after.tokens
    assert fresh.proposals[-1].prefixes == after.prefixes and after.prefixes
