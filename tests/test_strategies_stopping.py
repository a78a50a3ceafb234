"""Draft length: chains that stop when a rejection becomes likely, and lengths by goodput."""
from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul
from random import Random
from types import SimpleNamespace

import pytest
import torch
from drafting_runs import recording_rejections
from registry import Collapse
from tables import TableModel, write

from playground.algorithms.speculative.drafting import chain_until, new_tree
from playground.algorithms.speculative.speculative_loop import rounds
from playground.contract import find, make
from playground.contract.lane_config import Assembly, LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.errors import Refusal
from playground.events import Draft, Figure
from playground.events import Test as Looked
from playground.trace import metrics
from strategies.speculative.smartspec import PacedDrafter, Requests, Server, SmartSpec
from strategies.speculative.specdec_plus_plus import SpecDecPlusPlus
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.speculation import GREEDY, MODEL, collapses, first_drafts, speculative_lane
from support.speculative_runs import CHAIN, DropsDoubtful, law_distance, of, recorded, with_drafter


def smart(drafter: str = "draft_model", *samplers: tuple[str, dict], depth: int = 5, **knobs) -> LaneConfig:
    return LaneConfig("smartspec", {"costs": "simulated", **knobs}, [(drafter, {"depth": depth}), *samplers])


COLLAPSES = {
    "specdec_plus_plus": [
        *collapses("specdec_plus_plus", most=0),
        Collapse(speculative_lane("specdec_plus_plus", "rejection", AT_ONE, h=1.0, most=3), CHAIN),
        Collapse(speculative_lane("specdec_plus_plus", "rejection", AT_ONE, h=0.0, least=3, most=3), CHAIN),
    ],
    "smartspec": [
        Collapse(smart(depth=0), GREEDY),
        Collapse(smart("prompt_lookup", AT_ONE, depth=0), MODEL),
        Collapse(smart("draft_model", AT_ONE, depth=3, load=1, row=0.0, kv=0.0, draft=0.0), CHAIN),
    ],
}


# --- SpecDec++: stop when a rejection becomes likely ---

def saying(*chances: float) -> TableModel:
    """After a prompt of one token, its successive argmaxes have these probabilities."""
    def scores(context):
        chance = chances[min(len(context), len(chances)) - 1]
        return torch.tensor([chance, (1 - chance) / 2, (1 - chance) / 2], dtype=torch.float64).log()

    return TableModel("abc", rule=scores)


def first_chain(models: dict, **knobs) -> list[int]:
    """SpecDec++'s first draft, by the draft's own probabilities."""
    config = speculative_lane("specdec_plus_plus", "greedy_match", estimate="draft", **knobs)
    ((_, tree, _),) = first_drafts(config, models, 30)
    return tree.tokens


@pytest.mark.oracle("specdec_plus_plus")
@pytest.mark.parametrize("late, guesses", [(True, 4), (False, 3)])
def test_a_chain_ends_when_its_acceptance_probability_falls_below_one_minus_h(late, guesses):
    """1 - .9 = .1, 1 - .72 = .28, 1 - .36 = .64: the third draft token makes it doubtful; the paper's head would see
    that one draft token later.
    """
    models = {"target": TableModel("abc"), "draft": saying(.9, .8, .5, .99)}
    assert len(first_chain(models, h=0.5, least=1, late=late)) == guesses


def length_by_formula(chances: list[float], h: float, least: int, most: int, late: bool) -> int:
    """The first length at which 1 minus the product of the probabilities exceeds h; judged late, without the last."""
    for length in range(1, most):
        if length >= least and 1 - prod(chances[:length - late]) > h:
            return length
    return most


def check_specdec(drafter: type[SpecDecPlusPlus]) -> None:
    """Length of the first chain, given the acceptance probability of every token."""
    lengths = set()
    for seed in range(30):
        chance = Random(seed)
        chances = [chance.uniform(0.6, 0.99) for _ in range(12)]
        knobs = {"h": chance.uniform(0.1, 0.9), "least": chance.randrange(1, 5), "most": 12, "late": seed % 2 == 0}
        seen, models = [], {"target": TableModel("abc"), "draft": saying(*chances)}
        assembly = with_drafter(drafter(estimate="draft", **knobs), verifier="greedy_match")
        assembly.decoder.verifier = recording_rejections(seen)
        write(assembly, models, [0], Limits(0, 14), Draws(0))
        lengths.add(len(seen[0][0]))
        assert len(seen[0][0]) == length_by_formula(chances, **knobs)
    assert len(lengths) > 5


class GoesByTheLastChance(SpecDecPlusPlus):
    def survival(self, chances):
        return [*chances[:-1], 1.0] if self.late else chances


class ForgetsTheLag(SpecDecPlusPlus):
    """Judges the newest token at once, which the prediction head could not."""

    def survival(self, chances):
        return list(accumulate(chances, mul))


class StopsAtTheLeast(SpecDecPlusPlus):
    """Ignores the minimum draft length."""

    def _should_stop(self, tree):
        return len(tree) > self.least and super()._should_stop(tree)


@pytest.mark.oracle("specdec_plus_plus")
def test_the_length_of_a_chain_equals_the_formula():
    check_specdec(SpecDecPlusPlus)


@pytest.mark.refuses("specdec_plus_plus")
@pytest.mark.parametrize("wrong", [GoesByTheLastChance, ForgetsTheLag, StopsAtTheLeast], ids=lambda cls: cls.__name__)
def test_a_wrong_stop_rule_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_specdec(wrong)


@pytest.mark.parametrize(
    "h, least, most, late, guesses",
    [
        (0.0, 1, 20, True, 2),
        (0.0, 1, 20, False, 1),
        (0.0, 3, 20, True, 3),
        (1.0, 1, 20, True, 20),
        (1.0, 1, 7, False, 7),
        (0.0, 4, 2, True, 2),
    ],
)
def test_h_zero_makes_the_shortest_chain_and_h_one_the_longest(h, least, most, late, guesses):
    models = {"target": TableModel("abc"), "draft": saying(.6)}
    assert len(first_chain(models, h=h, least=least, most=most, late=late)) == guesses


def test_acceptance_estimates_start_at_the_drafts_probability_and_converge_to_observed_rates():
    known = type(make("specdec_plus_plus")._calibration)()
    assert known.chance(0.85) == pytest.approx(0.85)
    for stood in [True] * 30 + [False] * 70:
        known.learn(0.88, stood)
    assert known.chance(0.85) == pytest.approx(0.3, abs=0.02)
    assert known.chance(0.15) == pytest.approx(0.15), "other probabilities are not touched"
    assert known.figure("what was said").data["values"] == [0.3]


class CountsAll(find("specdec_plus_plus")):
    """Counts untested draft tokens as rejected."""

    def observe(self, tree, rows, verdict):
        for node in range(len(tree)):
            self._calibration.learn(tree.confidence[node], node in verdict.kept)


@pytest.mark.parametrize("cls, right", [(find("specdec_plus_plus"), True), (CountsAll, False)], ids=["tested", "all"])
def test_only_tested_draft_tokens_update_the_acceptance_estimate(cls, right):
    """Draft and target agree at six of ten positions, whatever came before, so 60 % of the draft tokens are accepted,
    if only tested ones count.
    """
    certain = torch.eye(3, dtype=torch.float64) * 50
    target, draft = (lambda context: certain[int(len(context) % 10 >= 6)]), (lambda context: certain[0])
    models = {"target": TableModel("abc", rule=target), "draft": TableModel("abc", rule=draft)}
    assembly = with_drafter(cls(h=1.0, most=8, estimate="draft"))
    lane = write(assembly, models, [0], Limits(0, 200), Draws(0))
    known = lane.assembly.decoder.drafter._calibration
    measured = sum(known.accepted) / sum(known.tested)
    assert (abs(measured - 0.6) < 0.05) == right


def test_an_overconfident_draft_is_soon_stopped_early():
    certain = torch.tensor([[9.0, 0, 0], [0, 9.0, 0]], dtype=torch.float64)
    models = {
        "target": TableModel("abc", rule=lambda context: certain[len(context) % 2]),
        "draft": TableModel("abc", rule=lambda context: certain[0]),
    }
    lengths = []

    class Watched(find("specdec_plus_plus")):
        def observe(self, tree, rows, verdict):
            lengths.append(len(tree))
            super().observe(tree, rows, verdict)

    write(with_drafter(Watched(h=0.4, least=1, most=8)), models, [0], Limits(0, 60), Draws(0))
    assert lengths[0] == 8 and max(lengths[5:-2]) <= 3


SHORT = {"h": 0.5, "least": 1, "late": False}


@pytest.mark.oracle("specdec_plus_plus")
@pytest.mark.parametrize("knobs", [SHORT, SHORT | {"late": True}, SHORT | {"estimate": "draft"}], ids=str)
def test_a_chain_may_stop_depending_on_its_draft_tokens_if_all_are_verified(knobs):
    assert law_distance(with_drafter(find("specdec_plus_plus")(**knobs), AT_ONE), tables("ab")) < EXACT


@pytest.mark.slow
@pytest.mark.refuses("specdec_plus_plus")
def test_withdrawing_a_doubtful_draft_token_changes_the_distribution():
    assert law_distance(with_drafter(DropsDoubtful(**SHORT), AT_ONE), tables("ab")) > WRONG


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


# --- properties of both ---

def test_a_stop_rule_is_evaluated_after_each_draft_token_and_ends_the_chain():
    asked = []

    class Stopping(find("draft_model")):
        def propose(self, lm, budget):
            return (
                yield from chain_until(
                    lm,
                    lm.stream("draft"),
                    new_tree(lm, self),
                    budget,
                    lambda chain: asked.append(len(chain)) or len(chain) == 3,
                )
            )

    write(with_drafter(Stopping()), tables("abc"), [0], Limits(0, 20), Draws(0))
    assert asked[:3] == [1, 2, 3] and max(asked) == 3
