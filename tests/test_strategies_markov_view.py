"""The numbers of a step against a Markov chain with known probabilities, brute force and the definitions."""
from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from pairs import pair
from tables import TableModel

from playground.contract import find
from playground.engine.forward_input import ForwardInput
from playground.events import Figure, Note
from support.overlay_runs import read_by, shades

MarkovView = find("markov_view")
LETTERS = "abcd"
TEXT, START = [0, 1, 2, 3, 0, 2, 1, 1], 3
CHAIN = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(4)).double() * 1.5  # scores by the last two tokens


def chain_model(rule=None) -> TableModel:
    known = rule or (lambda context: CHAIN[context[-2] if len(context) > 1 else 0, context[-1]])
    return TableModel(LETTERS, rule=known)


def information(context: list[int], model: TableModel) -> float:
    """Mutual information of the next two tokens, by the sum over all pairs."""
    first = model.scores(tuple(context)).softmax(0).tolist()
    joint = {
        (a, b): first[a] * float(model.scores((*context, a)).softmax(0)[b]) for a, b in product(range(4), repeat=2)
    }
    second = [sum(joint[a, b] for a in range(4)) for b in range(4)]
    return sum(p * math.log(p / (first[a] * second[b])) for (a, b), p in joint.items() if p > 0)


def curve(events, name: str) -> list[float]:
    return [event.data["series"][name] for event in events if isinstance(event, Figure) and name in event.data.get(
        "series", {})]


def check(cls: type[MarkovView]) -> None:
    model = chain_model()
    contexts = [TEXT[:at] for at in range(START, len(TEXT))]  # before each generated token
    rows = [model.scores(tuple(context)).softmax(0).tolist() for context in contexts]
    events = read_by(cls(branches=4), model, TEXT, START)
    differ = [sum(p * q for a, p in enumerate(row) for b, q in enumerate(row) if a != b) for row in rows]
    assert shades(events) == pytest.approx(differ, abs=1e-4)
    entropies = [-sum(p * math.log(p) for p in row) for row in rows]
    assert curve(events, "entropy") == pytest.approx(entropies, abs=1e-4)
    pairs = [information(context, model) for context in contexts]
    assert curve(events, "dependence of the next two tokens") == pytest.approx(pairs, abs=1e-4)
    (note,) = [event.text for event in events if isinstance(event, Note)]
    assert f"{sum(pairs) / len(pairs):.3f} nats" in note


class FromTheNextRow(MarkovView):
    """Wrong: the second token's distribution after the token that was written, whatever the candidate."""

    def read_ahead(self, first, logits):
        super().read_ahead(first, [rows[:1].expand_as(rows) if len(rows) else rows for rows in logits])


class WithoutNormalising(MarkovView):
    """Wrong: as if the two draws were of the squares."""

    def read_logits(self, first, logits):
        super().read_logits(first, 2 * logits)


class OfTheTokenRead(MarkovView):
    """Wrong: painted on the token that the row read."""

    def begin(self, text, model):
        super().begin(text._replace(start=text.start + 1), model)


@pytest.mark.oracle("markov_view")
def test_difference_entropy_and_dependence_are_those_of_the_chain():
    check(MarkovView)


@pytest.mark.refuses("markov_view")
@pytest.mark.parametrize("wrong", [FromTheNextRow, WithoutNormalising, OfTheTokenRead])
def test_a_wrong_second_token_power_or_row_fails(wrong):
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.strategy("markov_view")
@pytest.mark.parametrize("rule, expected", [
    (lambda context: torch.arange(4).double(), 0.0),  # whatever came before
    (lambda context: torch.zeros(4).double() if len(context) % 2 else 60.0 * torch.eye(4)[context[-1]].double(),
     math.log(4)),  # a uniform token, then its copy
])
def test_independent_tokens_share_nothing_and_a_copy_all_of_its_entropy(rule, expected):
    events = read_by(MarkovView(branches=4, quantity="dependence"), chain_model(rule), [0, 1, 2, 3], 3)
    assert curve(events, "dependence of the next two tokens") == pytest.approx([expected], abs=1e-4)


@pytest.mark.strategy("markov_view")
def test_one_branch_shows_no_dependence_and_few_branches_at_most_their_entropy():
    from strategies.overlays.markov_view import dependence
    weights = torch.rand(5, generator=torch.Generator().manual_seed(0)).double()
    after = torch.rand(5, 9, generator=torch.Generator().manual_seed(1)).double()
    after /= after.sum(1, keepdim=True)
    assert dependence(weights[:1], after[:1]) == pytest.approx(0, abs=1e-12)
    shares = weights / weights.sum()
    assert 0 <= dependence(weights, after) <= -float((shares * shares.log()).sum())


def fisher(p: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return head.T @ (torch.diag(p) - p[:, None] * p) @ head


@pytest.mark.strategy("markov_view")
def test_spread_and_rank_are_the_trace_and_the_eigenvalues_of_the_fisher_information():
    from strategies.overlays.markov_view import effective_rank
    generator = torch.Generator().manual_seed(3)
    head, p = torch.randn(7, 5, generator=generator).double(), torch.rand(7, generator=generator).double()
    p /= p.sum()
    metric = fisher(p, head)
    overlay = MarkovView()
    overlay._head = head
    spread, rank = overlay._geometry(p[None])
    assert float(spread) == pytest.approx(float(metric.trace() / (p @ head.square().sum(1))), abs=1e-12)
    shares = torch.linalg.eigvalsh(metric) / metric.trace()
    assert float(rank) == pytest.approx(float(torch.special.entr(shares.clamp(min=0)).sum().exp()), abs=1e-9)
    step = 1e-4 * torch.randn(5, generator=generator).double()
    moved = (p.log() + head @ step).softmax(0)
    assert float((p * (p / moved).log()).sum()) == pytest.approx(float(step @ metric @ step) / 2, rel=1e-2)
    assert float(effective_rank(torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0]).double(), head)) == pytest.approx(1, abs=1e-6)


@pytest.mark.strategy("markov_view")
def test_branches_are_read_after_their_row_and_leave_the_text_as_it_is():
    """On a network, against fresh forwards of every prefix with each candidate."""
    model, tokens = pair().target, [70, 71, 72, 70, 71, 90]
    overlay = MarkovView(branches=3)
    seen = {}
    overlay.read_ahead = lambda first, logits: seen.update(enumerate(logits, first))
    read_by(overlay, model, tokens, 3)
    for at in (2, 3, 4):
        for candidate, found in zip(overlay._tops[at][0], seen[at]):
            prefix = [*tokens[:at + 1], candidate]
            (logits,), _ = model.forward([ForwardInput(model.new_store(), prefix, list(range(-1, len(prefix) - 1)))])
            assert (logits[-1] - found).abs().max() < 1e-9
    (whole,), _ = model.forward([ForwardInput(model.new_store(), tokens, list(range(-1, len(tokens) - 1)))])
    assert len(overlay._numbers) == 1 and len(overlay._numbers[0]) == len(whole)
