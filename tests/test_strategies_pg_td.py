"""Programs that are planned with tests: the tree search against a reference as specified."""
from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from itertools import product

import pytest
from registry import Collapse
from tables import TableModel, Text, write

import playground
from playground.algorithms.programs import sandbox
from playground.contract import find, make
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Figure, Forward
from playground.request_limits import Rules
from playground.ui.components.settings import Settings
from strategies.search.pg_td import SearchState
from support.search_runs import of, run
from support.speculation import GREEDY

COLLAPSES = {
    "pg_td": [Collapse(of("pg_td", rollouts=1), GREEDY), Collapse(of("pg_td", width=1, rollouts=4), GREEDY)],
}


@pytest.fixture(scope="module")
def bundled():
    return playground.load()


TESTS = 'work(1) == 2\nwork(3) == 4'


def planned(model: TableModel, reward, monkeypatch, length: int = 3, **knobs):
    """A search with a reward in place of tests; returns the run and the programs in the order they were judged."""
    judged = []
    monkeypatch.setattr(
        find("pg_td").decode.__globals__["Tests"],
        "passed",
        lambda self, program: judged.append(program) or reward(program),
    )
    return run(of("pg_td", **knobs), model, [0], length), judged


def test_with_a_large_budget_the_best_program_is_found(monkeypatch):
    for seed in range(4):
        model, worths = TableModel("abc", seed=seed, spread=0.3), random.Random(seed)
        worth = {"".join(text): worths.random() for text in product("abc", repeat=3)}
        recorded, judged = planned(model, worth.get, monkeypatch, width=3, rollouts=256, c=16.0)
        assert recorded.lane.text == max(worth, key=worth.get) and len(judged) == len(set(judged)) == 27


def test_the_first_program_is_greedys_and_the_best_so_far_only_rises(monkeypatch):
    for seed in range(4):
        model = TableModel("abcd.", ".", seed=seed)
        recorded, judged = planned(model, lambda program: program.count("b") / 9, monkeypatch, length=5, rollouts=12)
        assert judged[0] == write(assemble(GREEDY), {"target": model}, [0], Limits(0, 5), Draws(0)).text
        best = [
            event.data["series"]["best so far"]
            for event in recorded.of(Figure)
            if event.name == "share of tests passed"
        ]
        assert best == sorted(best) and len(best) == 12 and recorded.lane.text.count("b") / 9 == best[-1]


@pytest.mark.oracle("pg_td")
def test_the_search_follows_the_formula_token_by_token(monkeypatch):
    """The same search as specified: every context read again, nothing shared with the code under test."""
    for seed in range(4):
        model, worth = TableModel("abcd", seed=seed), random.Random(seed)
        rewards = {"".join(text): worth.randrange(4) / 4 for text in product("abcd", repeat=4)}
        _, judged = planned(model, rewards.get, monkeypatch, length=4, rollouts=20, width=3)
        assert judged == by_the_book(model, rewards, 20, max)


def by_the_book(
    model: TableModel, rewards: dict, rollouts: int, value, c: float = 4.0, c_base: float = 10.0
) -> list[str]:
    returns, visits, states, tried = defaultdict(list), Counter({(): 1}), {()}, []

    def score(state: Text, token: int, priors: dict) -> float:
        known = returns[state, token]
        beta = math.log((visits[state] + c_base + 1) / c_base) + c
        return (value(known) if known else 0.0) + beta * priors[token] * math.sqrt(math.log(visits[state])) / (
            1 + len(known)
        )

    for _ in range(rollouts):
        state, path = (), []
        while state in states and len(state) < 4:
            scores = model.scores((0, *state))
            top = scores.topk(3).indices.tolist()
            priors = dict(zip(top, scores[top].softmax(0).tolist()))
            token = max(top, key=lambda token: score(state, token, priors))
            path.append((state, token))
            state = (*state, token)
        if len(state) < 4:
            states.add(state)
            visits[state] = 1
        text = state
        while len(text) < 4:
            text = (*text, int(model.scores((0, *text)).argmax()))
        program = "".join("abcd"[token] for token in text)
        tried += [program] if program not in tried else []
        for before, token in path:
            returns[before, token].append(rewards[program])
            visits[before] += 1
        if rewards[program] == 1:
            break
    return tried


@pytest.mark.refuses("pg_td")
def test_mean_values_give_another_search(monkeypatch):
    differ = 0
    for seed in range(6):
        model, worth = TableModel("abcd", seed=seed), random.Random(seed)
        rewards = {"".join(text): worth.randrange(4) / 4 for text in product("abcd", repeat=4)}
        _, judged = planned(model, rewards.get, monkeypatch, length=4, rollouts=24, width=3)
        differ += judged != by_the_book(model, rewards, 24, lambda known: sum(known) / len(known))
    assert differ > 1


STATES = {
    "the mean of what came of a token": (
        "value",
        lambda state, a: sum(state.returns[a]) / max(1, len(state.returns[a])),
    ),
    "no exploration": ("score", lambda state, a, c, c_base: state.value(a)),
    "every token as likely": ("score", lambda state, a, c, c_base: state.value(a) + c / (1 + len(state.returns[a]))),
}


@pytest.mark.refuses("pg_td")
@pytest.mark.parametrize("part, wrong", STATES.values(), ids=STATES)
def test_a_wrong_planning_is_refused(part, wrong, monkeypatch):
    monkeypatch.setattr(SearchState, part, wrong)
    with pytest.raises(AssertionError):
        test_the_search_follows_the_formula_token_by_token(monkeypatch)


def test_no_prefix_is_read_twice_except_the_winners(monkeypatch):
    model = TableModel("abcd", seed=1)
    recorded, judged = planned(model, lambda program: 0.0, monkeypatch, length=5, rollouts=16)
    tokens = [event.tokens for event in recorded.of(Forward)]
    beginnings = {program[:i] for program in judged for i in range(1, 5)}
    assert sum(tokens[1:-1]) == len(beginnings) and tokens[-1] == 4


def test_the_reward_of_a_program_is_the_share_of_tests_it_passes():
    tests = find("pg_td").decode.__globals__["Tests"].read(TESTS)
    assert tests.passed("def work(x):\n    return x + 1") == 1
    assert tests.passed("def work(x):\n    return 2") == 1 / 2
    assert tests.passed("def work(x):\n    return 2 if x < 2 else x / 0") == 1 / 2, "one failure does not undo the rest"
    assert tests.passed("def work(x):\n    import os\n    return 2") == 0
    assert tests.passed("def work(x)") == tests.passed("return 2") == 0
    assert (
        find("pg_td").decode.__globals__["Tests"].read("f([1]) == (1, 2)").passed("def f(x):\n    return [1, 2]") == 1
    )


@pytest.mark.slow
def test_a_harmful_program_is_stopped_in_the_sandbox():
    assert sandbox.call("def f(x):\n    return x * 2", "f", [1, "a"]) == [2, "aa"]
    for body in ("return open('/etc/passwd').read()", "while True:\n        pass", "return ().__class__"):
        assert sandbox.tries(f"def f(x):\n    {body}", "f", [1, 2]) == [None, None]


@pytest.mark.parametrize(
    "lines", ["", "work(1)", "work(1) == 2\nplay(1) == 2", "work(1, 2) == 3", "work(open) == 3", "import os"]
)
def test_invalid_tests_are_refused(lines):
    with pytest.raises(Refusal):
        make("pg_td", tests=lines)


def test_a_public_page_does_not_search_by_running_programs():
    settings = Settings(prompt="How?", lanes=[{"strategy": "pg_td"}])
    settings.check(Rules())
    settings.check(Rules.for_visitors(programs=True))
    with pytest.raises(Refusal, match="Planning-guided decoding runs programs"):
        settings.check(Rules.for_visitors())


@pytest.mark.slow
def test_the_bundled_model_finds_a_passing_program(bundled):
    asked, tests = (
        "Python: def work(items). Keep the odd items, then multiply each by 3, then return the sum.",
        "work([1, 2, 3]) == 12\nwork([]) == 0",
    )
    recorded = playground.run(
        "pg_td", asked, models=bundled, chat=True, max_new_tokens=96, knobs={"tests": tests, "rollouts": 3}
    )
    shares = [stamped.event.data["series"]["best so far"] for stamped in recorded.trace.events
              if isinstance(stamped.event, Figure) and stamped.event.name == "share of tests passed"]
    assert shares == sorted(shares) and shares[-1] == 1
    assert find("pg_td").decode.__globals__["Tests"].read(tests).passed(recorded.text) == 1
