"""Exact optimal transport: the acceptance rate is that of the linear program, and the output follows the target."""
from __future__ import annotations

from collections import deque
from fractions import Fraction
from itertools import product
from math import prod
from random import Random

import pytest
import torch

from playground.contract import find, make
from playground.engine.sampling import residual_distribution
from strategies.speculative.exact_transport import draft_labels as labels
from strategies.speculative.exact_transport.transport_plan import TransportPlan
from strategies.speculative.k_seq import optimal_transport
from support.draft_trees import P, Q, tokens_of_first_round
from support.laws import AT_ONE, EXACT, WRONG
from support.speculation import off, speculative_lane

Transport = find("exact_transport")
Numbers = list[Fraction]


def cases(count: int) -> list[tuple[Numbers, Numbers, int]]:
    """Random p, q and k, with zeros and ties."""
    chance, found = Random(3), []
    while len(found) < count:
        size, k = chance.randint(2, 4), chance.randint(1, 3)
        p, q = ([chance.choice([0, 1, 1, 2, 3, 7]) for _ in range(size)] for _ in range(2))
        if sum(p) and sum(q):
            found.append(([Fraction(x, sum(p)) for x in p], [Fraction(x, sum(q)) for x in q], k))
    return found


def largest_flow(p: Numbers, q: Numbers, k: int) -> Fraction:
    """The optimum of the linear program: all that can flow from k-tuples of draft tokens to a token among them."""
    drafts = [draft for draft in product(range(len(q)), repeat=k) if prod(q[token] for token in draft)]
    room = {("from", draft): prod(q[token] for token in draft) for draft in drafts}
    room |= {(draft, token): Fraction(1) for draft in drafts for token in set(draft)}
    room |= {(token, "to"): p[token] for token in range(len(p))}
    total = Fraction(0)
    while path := augmenting_path(room):
        amount = min(room[edge] for edge in path)
        for start, end in path:
            room[start, end] -= amount
            room[end, start] = room.get((end, start), Fraction(0)) + amount
        total += amount
    return total


def augmenting_path(room: dict) -> list[tuple]:
    """The edges of a shortest path with room from the source to the sink; empty if there is none."""
    ends, before, waiting = {}, {"from": None}, deque(["from"])
    for (start, end), left in room.items():
        ends.setdefault(start, []).extend([end] if left > 0 else [])
    while waiting and "to" not in before:
        place = waiting.popleft()
        fresh = [end for end in ends.get(place, []) if end not in before]
        before |= dict.fromkeys(fresh, place)
        waiting.extend(fresh)
    path, place = [], "to"
    while before.get(place) is not None:
        path.append((before[place], place))
        place = before[place]
    return path


def planned(p: Numbers, q: Numbers, k: int) -> TransportPlan:
    return TransportPlan(*(torch.tensor([float(x) for x in row], dtype=torch.float64) for row in (p, q)), k)


def output(plan: TransportPlan) -> tuple[float, torch.Tensor]:
    """Acceptance rate and output distribution of the rule, summed over all drafts."""
    accepted, rule = torch.zeros_like(plan.p), labels.DraftLabels(plan)
    for draft in product(plan.q.nonzero()[:, 0].tolist(), repeat=plan.k):
        for token, chance in rule.accepted_given(draft).items():
            accepted[token] += chance * prod(plan.q[list(draft)].tolist())
    return float(accepted.sum()), accepted + (1 - accepted.sum()) * plan.residual()


def check_rule() -> None:
    for p, q, k in cases(50):
        plan = planned(p, q, k)
        rate, found = output(plan)
        assert (found - plan.p).abs().max() < EXACT
        assert rate == pytest.approx(float(largest_flow(p, q, k)), abs=EXACT)


def one_after_another(plan, levels):
    """Wrong: the labels of a level follow those of the one before, whatever its ratio."""
    free = labels.FreeLabels(plan)
    return [free.take(length, 1.0) for length in levels.masses.tolist()]


def with_too_few_levels(plan):
    """Wrong: two levels, though the labels for them may not exist."""
    ratios = labels._ratios(plan)
    low, high = float(ratios[plan.order].min()), float(ratios.max())
    share = (ratios - low) / (high - low) if high > low else torch.ones_like(ratios)
    masses = torch.stack([(plan.q * (1 - share)).sum(), (plan.q * share).sum()])
    return labels.Levels(torch.tensor([low, high], dtype=torch.float64), masses, torch.ones_like(plan.p).long(), share)


@pytest.mark.oracle("exact_transport")
def test_the_rule_accepts_as_often_as_the_linear_program_and_gives_p():
    check_rule()


@pytest.mark.refuses("exact_transport")
@pytest.mark.parametrize("name, wrong", [("labels_of", one_after_another), ("levels_of", with_too_few_levels)])
def test_other_labels_give_another_distribution(name, wrong, monkeypatch):
    monkeypatch.setattr(labels, name, wrong)
    with pytest.raises(AssertionError):
        check_rule()


class TakesEveryDraftTokenTwice(Transport):
    """Wrong: as if every token had been drafted by two sequences."""

    def _transported(self, lm, tree, children, p, position):
        return super()._transported(lm, tree, [*children, *children], p, position)


@pytest.mark.oracle("exact_transport")
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_lane_keeps_the_targets_distribution(rows):
    letters, length = ("ab", 3) if rows == 3 else ("abc", 2)
    assert off(make("spectr", rows=rows, length=2), Transport(), letters, length) < EXACT


@pytest.mark.refuses("exact_transport")
def test_a_wrong_number_of_drafts_gives_another_distribution():
    assert off(make("spectr", rows=2, length=2), TakesEveryDraftTokenTwice()) > WRONG


def by_rejection(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """How often recursive rejection sampling accepts one of k independent draft tokens."""
    rest, none = p, 1.0
    for _ in range(k):
        none *= 1 - float(torch.minimum(rest, q).sum())
        rest = residual_distribution(rest, q)
    return 1 - none


@pytest.mark.strategy("exact_transport")
def test_no_other_rule_accepts_more_often():
    generator = torch.Generator().manual_seed(0)
    gains = []
    for k in (1, 2, 3, 8):
        for _ in range(30):
            p, q = (2 * torch.randn(2, 9, generator=generator, dtype=torch.float64)).softmax(-1)
            rate, rejection = TransportPlan(p, q, k).rate, by_rejection(p, q, k)
            once = optimal_transport.accepted_once(p, q, optimal_transport.division(p, q, k))
            assert rate >= max(rejection, optimal_transport.accepted_at_all(once, k)) - EXACT
            assert k > 1 or rate == pytest.approx(rejection)
            gains.append(rate - rejection)
    assert max(gains) > 0.05


@pytest.mark.strategy("exact_transport", "k_seq", "rejection")
def test_a_round_accepts_most_with_the_exact_solution():
    accepted = [
        tokens_of_first_round(speculative_lane("spectr", verifier, AT_ONE, rows=2, length=1), 1) - 1
        for verifier in ("exact_transport", "k_seq", "rejection")
    ]
    assert accepted == sorted(accepted, reverse=True) and accepted[0] == pytest.approx(0.86)
    assert TransportPlan(P, Q, 2).rate == pytest.approx(0.86)


@pytest.mark.strategy("exact_transport")
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_few_levels_suffice_for_a_large_vocabulary(spread):
    generator = torch.Generator().manual_seed(1)
    scores = spread * torch.randn(6000, generator=generator)
    p, q = (scores + 0.5 * torch.randn(6000, generator=generator)).softmax(-1), scores.softmax(-1)
    plan = TransportPlan(p, q, 4)
    levels = labels.levels_of(plan)
    assert len(levels.ratios) < 64
    for mass, ratio, parts in zip(levels.masses, levels.ratios, labels.labels_of(plan, levels)):
        assert sum(end - start for start, end in parts) == pytest.approx(float(mass), abs=1e-10)
        assert sum(plan.below(end) - plan.below(start) for start, end in parts) == pytest.approx(
            float(mass * ratio), abs=1e-10
        )
    means = levels.share * levels.ratios[levels.upper] + (1 - levels.share) * levels.ratios[levels.upper - 1]
    assert torch.allclose(means * plan.q, plan.accepted, atol=1e-12)
