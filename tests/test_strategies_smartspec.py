"""SmartSpec: draft lengths by goodput, simulated and measured, and wrong variants against the same check."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace

import pytest
from drafting_runs import recording_rejections
from registry import Collapse
from tables import TableModel, write

from playground.algorithms.speculative.speculative_loop import rounds
from playground.contract import make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.forward_times import forward_times
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Draft, Figure, Note
from playground.events import Test as Looked
from playground.trace import metrics
from strategies.speculative.smartspec import PacedDrafter, Requests, Server, SmartSpec
from support.laws import AT_ONE, EXACT, tables
from support.speculation import GREEDY, MODEL
from support.speculative_runs import CHAIN, law_distance, of, recorded

BRIEF = {"smartspec": {"costs": "simulated"}}  # the same on every machine
MEASURING = LaneConfig("smartspec", {}, [("draft_model", {"depth": 5})])
FORWARDS = {(rows, context): 2e-3 + 1e-4 * rows + 1e-6 * context for rows in (1, 4, 16) for context in (32, 256)}


def measured(monkeypatch, draft: float) -> tuple[list[int], list[str]]:
    """Lengths of the drafts, and notes, where a draft forward takes `draft` times as long as a target forward."""
    factors = iter([1.0, draft])

    def times(model):
        factor = next(factors)
        return {size: factor * seconds for size, seconds in FORWARDS.items()}

    monkeypatch.setattr("playground.decoding.lane.lm.forward_times", times)
    _, events = recorded(MEASURING, length=20)
    return [len(draft.tokens) for draft in of(Draft, events)], [note.text for note in of(Note, events)]


def test_the_draft_length_follows_from_what_forwards_take_on_this_machine(monkeypatch):
    fast, notes = measured(monkeypatch, 0.01)
    slow, _ = measured(monkeypatch, 5.0)
    assert max(fast) > 1 and not slow
    assert "takes 2 ms, 0.1 ms for each input token and 0.001 ms for each token of context" in notes[0]


def test_the_times_are_those_of_forwards_and_are_measured_once(monkeypatch):
    monkeypatch.setattr(TableModel, "forward_times", None)
    lane = recorded(MEASURING, length=4)[0]._runners[0].lane
    times = lane.target_model.forward_times
    assert all(seconds > 0 for seconds in times.values()) and len(times) >= 3
    assert forward_times(lane.target_model) is times


def test_lanes_that_ask_at_the_same_time_know_the_same_times():
    model = TableModel()
    model.forward_times = None
    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(forward_times, [model] * 4)
    assert first and all(times is first for times in others)


def smart(drafter: str = "draft_model", *samplers: tuple[str, dict], depth: int = 5, **knobs) -> LaneConfig:
    return LaneConfig("smartspec", {"costs": "simulated", **knobs}, [(drafter, {"depth": depth}), *samplers])


COLLAPSES = {"smartspec": [
        Collapse(smart(depth=0), GREEDY),
        Collapse(smart("prompt_lookup", AT_ONE, depth=0), MODEL),
        Collapse(smart("draft_model", AT_ONE, depth=3, load=1, row=0.0, kv=0.0, draft=0.0), CHAIN),
    ]}


# --- SmartSpec: the draft length with the best goodput ---

def best(server, alpha: float, load: int = 1, context: int = 100, most: int = 8) -> int:
    return server.best_lengths([Requests(load, alpha, context)], most)[0]


@pytest.mark.oracle("smartspec")
def test_goodput_is_expected_tokens_over_the_time_of_a_step():
    server, batch = Server.simulated(row=0.1, kv=0.001, draft=0.5), [Requests(3, 0.6, 50)]
    time = 2 * 0.5 * (1 + 3 * (0.1 + 0.001 * 50)) + (1 + 3 * (0.1 * 3 + 0.001 * 50))
    assert server.time((2,), batch) == pytest.approx(time)
    assert server.goodput((2,), batch) == pytest.approx(3 * (1 + 0.6 + 0.36) / time)


@pytest.mark.oracle("smartspec")
def test_each_request_has_the_length_that_serves_the_batch():
    """Against the formula written out for two requests: draft forwards are shared as long as both of them draft."""
    server, batch = Server.simulated(row=0.2, kv=0.001, draft=0.1), [Requests(1, 0.9, 40), Requests(1, 0.3, 60)]

    def goodput(first: int, second: int) -> float:
        tokens = sum(0.9**i for i in range(first + 1)) + sum(0.3**i for i in range(second + 1))
        drafting = sum(
            0.1 * (1 + 0.2 * ((first > step) + (second > step)) + 0.001 * (40 * (first > step) + 60 * (second > step)))
            for step in range(max(first, second))
        )
        return tokens / (drafting + 1 + 0.2 * (2 + first + second) + 0.001 * 100)

    found = server.best_lengths(batch, 6)
    assert goodput(*found) == pytest.approx(max(goodput(a, b) for a in range(7) for b in range(7)))
    assert found[0] > found[1], "the request whose draft is better gets more of the batch"


@pytest.mark.parametrize("load, costs, alpha, guesses", [
    (1, (0.0, 0.0, 1e6), 0.99, 0),
    (1, (0.0, 0.0, 0.0), 0.5, 8),
    (1, (0.0, 0.0, 0.6), 0.6, 0),
    (64, (0.5, 0.0, 0.1), 0.7, 0),
], ids=["dear guesses", "free guesses and rows", "a chance no larger than the cost", "a busy server"])
def test_the_best_length_in_extreme_cases(load, costs, alpha, guesses):
    assert best(Server.simulated(*costs), alpha, load) == guesses


def test_a_busier_server_drafts_less_and_a_better_draft_more():
    loads, alphas = [1, 2, 4, 8, 16, 32, 64], [0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
    grid = [[best(Server.simulated(0.02, 0.0001, 0.2), alpha, load) for alpha in alphas] for load in loads]
    assert all(row == sorted(row) for row in grid) and all(
        list(column) == sorted(column, reverse=True) for column in zip(*grid)
    )
    assert grid[0][-1] == 8 and grid[-1][0] == 0


COSTS = {"load": 12, "row": 0.02, "kv": 0.001, "draft": 0.15, "accept": 0.6, "weight": 0.3}


def best_length(alpha: float, context: int, most: int) -> int:
    """Draft tokens of the round with most expected tokens per time; of equals the fewest."""
    def goodput(length: int) -> float:
        drafting = length * COSTS["draft"] * (1 + COSTS["load"] * (COSTS["row"] + COSTS["kv"] * context))
        checking = 1 + COSTS["load"] * (COSTS["row"] * (length + 1) + COSTS["kv"] * context)
        return COSTS["load"] * sum(alpha ** accepted for accepted in range(length + 1)) / (drafting + checking)

    return max(range(most + 1), key=lambda length: (goodput(length), -length))


def check_smartspec(preset: type[SmartSpec]) -> None:
    """Every round drafts as many tokens as the formula says of the rounds before it."""
    lengths = set()
    for seed in range(4):
        seen, depth, text = [], 6, [0, 1]
        models = {"target": TableModel("abc", seed=seed), "draft": TableModel("abc", seed=seed + 2 * (seed % 2))}
        drafter = make("draft_model", depth=depth)
        assembly = Assembly(preset(drafter, recording_rejections(seen), costs="simulated", **COSTS))
        write(assembly, models, text, Limits(0, 40), Draws(0))
        tested, stood = 1 / COSTS["weight"], COSTS["accept"] / COSTS["weight"]
        for tree, verdict in seen:
            alpha = min(0.99, max(0.01, stood / tested))
            assert len(tree) == best_length(alpha, len(text), min(depth, 42 - len(text) - 1))
            text = [*text, *(tree.tokens[node] for node in verdict.kept), verdict.token]
            lengths.add(len(tree))
            if len(tree):
                looked_at = len(verdict.kept) + (len(verdict.kept) < len(tree))
                tested, stood = 0.7 * tested + looked_at, 0.7 * stood + len(verdict.kept)
    assert len(lengths) > 3


class DraftsForNothing(SmartSpec):
    """Ignores the cost of the draft's forwards."""

    def decode(self, lm):
        yield from rounds(
            lm, PacedDrafter(self.drafter, Server.simulated(self.row, self.kv, 0.0), self), self.verifier
        )


class CountsWhatNobodyLookedAt(SmartSpec):
    def decode(self, lm):
        server = Server.simulated(self.row, self.kv, self.draft)
        yield from rounds(lm, DividesByDrafted(self.drafter, server, self), self.verifier)


class AlwaysTheLongest(SmartSpec):
    def decode(self, lm):
        yield from rounds(lm, self.drafter, self.verifier)


@pytest.mark.oracle("smartspec")
def test_every_round_drafts_as_many_tokens_as_the_formula_says():
    check_smartspec(SmartSpec)


@pytest.mark.refuses("smartspec")
@pytest.mark.parametrize("wrong", [DraftsForNothing, CountsWhatNobodyLookedAt, AlwaysTheLongest],
                         ids=lambda cls: cls.__name__)
def test_a_wrong_draft_length_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_smartspec(wrong)


class DividesByDrafted(PacedDrafter):
    """Counts untested draft tokens as rejected."""

    def observe(self, tree, rows, verdict):
        super().observe(
            tree,
            rows,
            SimpleNamespace(kept=verdict.kept, tests=[Looked(node, 0, 0, None, False) for node in range(len(tree))]),
        )


@pytest.mark.oracle("smartspec")
@pytest.mark.refuses("smartspec")
@pytest.mark.parametrize("cls, estimate", [(PacedDrafter, 0.7), (DividesByDrafted, 0.44)], ids=["tested", "drafted"])
def test_the_estimate_is_the_share_of_accepted_among_tested_draft_tokens(cls, estimate):
    """4000 rounds of four draft tokens, each accepted with probability 0.7. At a weight of 0.005 some 500 tested draft
    tokens count: a standard error of 0.02.
    """
    chance = Random(0)
    paced = cls(make("draft_model"), Server.simulated(0, 0, 0), SimpleNamespace(accept=0.5, weight=0.005, probe=9))
    for _ in range(4000):
        kept = next((i for i in range(4) if chance.random() >= 0.7), 4)
        tests = [Looked(node, 1, 1, None, node < kept) for node in range(min(4, kept + 1))]
        paced.observe([0] * 4, None, SimpleNamespace(kept=list(range(kept)), tests=tests))
    assert paced.alpha == pytest.approx(estimate, abs=0.08)


def test_a_heavy_load_turns_speculation_off_and_a_light_one_on_and_the_text_is_the_same():
    (busy, busy_events), (idle, idle_events) = (recorded(smart(load=load), length=30) for load in (64, 1))
    assert busy._runners[0].lane.tokens == idle._runners[0].lane.tokens
    assert metrics(busy.trace)["target_forwards"] > metrics(idle.trace)["target_forwards"]
    assert not of(Draft, busy_events) and len(of(Draft, idle_events)) > 5
    names = {event.name for event in of(Figure, busy_events) if "goodput" in event.name}
    assert names and all("simulated batch of 64" in name for name in names)


def test_after_many_rounds_without_drafts_one_token_is_proposed_as_a_probe():
    _, events = recorded(smart(load=64, probe=5), length=20)
    assert [len(draft.tokens) for draft in of(Draft, events)] == [1] * 3


@pytest.mark.oracle("smartspec")
@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup"])
def test_the_output_distribution_is_the_targets_for_any_sequence_of_lengths(drafter):
    assert law_distance(smart(drafter, AT_ONE, depth=3, load=1, weight=0.5, draft=0.6), tables("ab"), 4) < EXACT


def test_smartspec_supports_only_chains():
    for drafter, knobs in (("dyspec", {}), ("draft_model", {"width": 2})):
        with pytest.raises(Refusal, match="chains"):
            assemble(LaneConfig("smartspec", {}, [(drafter, knobs)]))
