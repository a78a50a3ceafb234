"""A*-decoding expands the state with the lowest f of all it has found."""
from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest
from registry import Collapse
from tables import Law, TableModel, Text, distance, law

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.runner import Runner
from playground.decoding.session import Session
from playground.events import Header, Note
from support.laws import AT_ONE, EXACT, WRONG
from support.scripted_rewards import hashed, scripted
from support.search_runs import Run

AStar = find("a_star")
BRIEF = {"a_star": {"reward": "likelihood", "k": 2, "step_tokens": 2, "budget": 24}}
PLAIN = LaneConfig("greedy", {}, [AT_ONE])
COLLAPSES = {
    "a_star": [
        Collapse(LaneConfig("a_star", {"reward": "likelihood", "k": 1, "temperature": 1.0}), PLAIN),
        Collapse(LaneConfig("a_star", {"reward": "likelihood", "temperature": 0.0}), LaneConfig("greedy")),
    ]
}
PROMPT, LENGTH = (0, 1), 3
EDGES = {
    "lost reward": lambda before, after: max(0.0, before - after),
    "gained reward": lambda before, after: max(0.0, after - before),
    "none": lambda before, after: 0.0,
}


def by_hand(model: TableModel, budget: int, cost: str, keeps: str = "all") -> Law:
    """The output distribution with steps of one token and two continuations, summed over everything sampled."""
    found = defaultdict(float)

    def ended(text: Text) -> bool:
        return bool(text) and text[-1] in model.end_ids

    def key(state: tuple) -> tuple:
        number, text, r, g = state
        return g + (1 - r), 1 - r, -len(text), number

    def answer(states: list, p: float) -> None:
        text = min([state for state in states if ended(state[1])] or states, key=key)[1]
        while len(text) < LENGTH and not ended(text):
            text = (*text, int(model.scores((*PROMPT, *text)).argmax()))
        found[text] += p

    def search(opened: list, full: list, count: int, spent: int, p: float) -> None:
        if not opened:
            return answer(full, p)
        state = min(opened, key=key)
        rest = [other for other in opened if other is not state]
        number, text, r, g = state
        if ended(text):
            return answer([*full, state], p)
        if len(text) == LENGTH:
            return search(rest, [*full, state], count, spent, p)
        if spent >= budget:
            return answer([*full, *opened], p)
        chances = model.scores((*PROMPT, *text)).softmax(0).tolist()
        for a, b in product(range(len(chances)), repeat=2):
            new = [
                (count + i, (*text, token), (after := hashed((*PROMPT, *text, token))), g + EDGES[cost](r, after))
                for i, token in enumerate(dict.fromkeys((a, b)))
            ]
            kept = new if keeps == "local" else [*rest, *new]
            search(kept, full, count + len(new), spent + 2, p * chances[a] * chances[b])

    search([(0, (), 0.5, 0.0)], [], 1, 0, 1.0)
    return dict(found)


def error(cls: type = AStar, budget: int = 4, cost: str = "lost reward", keeps: str = "all", ends: str = ".") -> float:
    model = TableModel("ab" + ends, ends, seed=5, spread=0.6)
    knobs = {"k": 2, "step_tokens": 1, "budget": budget, "cost": cost, "keeps": keeps, "temperature": 1.0}
    lane = scripted("a_star", hashed, cls, **knobs)
    return distance(law(lane, {"target": model}, list(PROMPT), LENGTH), by_hand(model, budget, cost, keeps))


@pytest.mark.oracle("a_star")
@pytest.mark.parametrize("cost, keeps", [("lost reward", "all"), ("gained reward", "all"), ("none", "local")])
def test_the_output_distribution_is_that_of_a_search_by_hand(cost, keeps):
    assert error(cost=cost, keeps=keeps) < EXACT


@pytest.mark.oracle("a_star")
def test_three_expansions_take_the_way_into_account():
    assert error(budget=6, ends="") < EXACT


class TakesTheWorst(AStar):
    def _f(self, state):
        return -super()._f(state)


class ForgetsTheWay(AStar):
    """Wrong: what was lost on the way does not count."""

    def _edge(self, before, after):
        return 0.0


class TakesTheLatest(AStar):
    """Wrong: depth first, whatever the rewards."""

    def _key(self, state):
        return -state.depth, state.number


@pytest.mark.refuses("a_star")
@pytest.mark.parametrize("wrong", [TakesTheWorst, ForgetsTheWay, TakesTheLatest])
def test_another_order_of_the_open_list_fails(wrong):
    assert error(wrong, budget=6, ends="") > WRONG


def searched(rule, cls: type | None = None, **knobs) -> Run:
    """A whole search over random texts of 8 tokens."""
    model = TableModel("abcd", seed=2)
    assembly = scripted("a_star", rule, cls, **{"k": 3, "step_tokens": 1, "temperature": 1.0, **knobs})
    lane = Lane(list(PROMPT), {"target": model}, assembly, Limits(1, 8), Recorder(model.tokens))
    session = Session([Header()], [Runner(lane, assembly)])
    for _ in session:
        pass
    assert lane.reason in ("end", "length"), session.trace.events[-1]
    return Run(lane, session)


def test_it_returns_to_an_earlier_state_when_all_continuations_look_worse():
    def rule(text: Text) -> float:
        return 0.9 - 0.3 * max(0, len(text) - 4)  # every third token is a disappointment

    def returns(**knobs) -> bool:
        return any(note.text.startswith("Back to state") for note in searched(rule, **knobs).of(Note))

    assert returns() and not returns(keeps="local")


class Recording(AStar):
    """The strategy, noting the f of every expanded state."""

    def _expanded(self, lm, state, first):
        yield Note(f"f {self._f(state)}")
        return (yield from super()._expanded(lm, state, first))


def test_with_gained_reward_as_cost_f_never_falls_from_one_expansion_to_the_next():
    notes = searched(hashed, Recording, cost="gained reward", budget=60).of(Note)
    costs = [float(note.text[2:]) for note in notes if note.text.startswith("f ")]
    assert len(costs) > 5 and all(before <= after + 1e-12 for before, after in zip(costs, costs[1:]))


def test_no_state_is_scored_twice():
    run = searched(hashed, budget=40)
    asked = run.lane.assembly.decoder._reward.asked
    assert len(asked) == len(set(asked)) > 6
