"""Anchored decoding: a text's divergence from a safe model is bounded. Compared with an independent computation."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from runs import figures, random_rows, run
from tables import Law, TableModel, distance, law, product_law
from torch import Tensor

from playground.contract import Decoder, find
from playground.contract.lane_config import LaneConfig
from playground.events import Note
from strategies.sampling import anchored as anchored_module
from strategies.sampling import anchored as anchoring
from support.plain_lanes import lane_of
from support.wrong_variants import refused

MODEL = LaneConfig("greedy", {}, [("temperature", {"t": 1.0})])


def anchored(**knobs) -> LaneConfig:
    return LaneConfig("anchored", knobs)


COLLAPSES = {
    "anchored": [Collapse(anchored(k=0.0), MODEL, on="draft"), Collapse(anchored(k=20.0, debt=False), MODEL),
                 Collapse(anchored(k=0.2, debt=False), MODEL, twins=True)],
}


def log_laws(seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    p, r = random_rows(seed, 2, size).log_softmax(-1)
    return p, r


def kl(q: dict, p: dict) -> float:
    """Divergence between distributions of whole texts, in nats."""
    return sum(chance * math.log(chance / p[text]) for text, chance in q.items() if chance > 0)


def test_divergence_from_the_safe_model_grows_with_theta_and_the_largest_affordable_theta_is_chosen():
    for seed in range(10):
        p, r = log_laws(seed)
        spent = [anchoring.divergence(anchoring.between(p, r, i / 200), p) for i in range(201)]
        assert all(a <= b + 1e-12 for a, b in zip(spent, spent[1:]))
        for budget in (0.01, 0.3, 1.0):
            theta, law_ = anchoring.nearest(p, r, budget)
            best = max(i for i, cost in enumerate(spent) if cost <= budget) / 200
            assert best <= theta < best + 0.006 and anchoring.divergence(law_, p) <= budget


@pytest.mark.oracle("anchored")
def test_no_other_distribution_within_the_budget_is_closer_to_the_risky_one():
    p, r = log_laws(3)
    _, best = anchoring.nearest(p, r, 0.3)
    others = [other for other in random_rows(8, 4000, 6).log_softmax(-1) if anchoring.divergence(other, p) <= 0.3]
    nearby = [((1 - mix) * best.exp() + mix * other.exp()).log() for other in others for mix in (0.05, 0.3)]
    allowed = [other for other in others + nearby if anchoring.divergence(other, p) <= 0.3]
    assert len(allowed) > 20
    assert all(anchoring.divergence(other, r) >= anchoring.divergence(best, r) - 1e-9 for other in allowed)


def test_at_both_ends_of_theta_it_is_one_of_the_models_and_removed_tokens_stay_removed():
    p, r = log_laws(4)
    assert (
        anchoring.nearest(p, r, 0.0) == (0.0, p)
        and anchoring.nearest(p, r, 50.0) == (1.0, r)
        and anchoring.nearest(p, p, 0.1)[0] == 1.0
    )
    gone = torch.tensor([True, False, False, False, False, False])
    masked_p, masked_r = (row.masked_fill(gone, -math.inf).log_softmax(-1) for row in (p, r))
    theta, law_ = anchoring.nearest(masked_p, masked_r, 0.2)
    assert 0 < theta < 1 and float(law_[0]) == -math.inf and not bool(law_.isnan().any())
    theta, law_ = anchoring.nearest(masked_p, r, 0.2)  # impossible for the safe model
    assert theta < 1 and float(law_[0]) == -math.inf and anchoring.divergence(law_, masked_p) <= 0.2


@pytest.mark.slow
@pytest.mark.oracle("anchored")
@pytest.mark.parametrize("k", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("indebted", [False, True])
def test_whole_texts_diverge_from_the_safe_model_by_at_most_the_budget(k, indebted):
    models, prompt = {"target": TableModel("abcd", seed=2), "draft": TableModel("abcd", seed=5)}, [0, 1, 3, 2]
    found, safe = law(anchored(k=k, debt=indebted, n=2), models, prompt, 3), product_law(models["draft"], prompt, 3)
    owed = debt_by_hand(models, prompt, 2) if indebted else 0.0
    assert kl(found, safe) <= max(0.0, 3 * k - owed) + 1e-9
    assert kl(found, safe) > 0.5 * max(0.0, 3 * k - owed), "hardly anything is spent, so the bound says nothing"
    assert sum(found.values()) == pytest.approx(1)


SAMPLERS = [("top_k", {"k": 1}), ("top_p", {"p": 0.4}), ("min_p", {"m": 0.7}), ("typical", {"mass": 0.3})]


def test_a_token_outside_one_support_costs_nothing_and_disjoint_supports_give_the_safe_model():
    p, r = (torch.tensor(row, dtype=torch.float64).log() for row in ([0.5, 0.3, 0.2, 0.0], [0.0, 0.3, 0.6, 0.1]))
    weights = [0.5, 0.3, 0.2 * 3 ** 0.5, 0.0]  # at theta = 1/2: p * (r / p) ** theta where both are positive
    expected = [weight / sum(weights) for weight in weights]
    assert anchoring.between(p, r, 0.5).exp().tolist() == pytest.approx(expected)
    for theta in (0.1, 0.5, 0.999):
        other = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64).log()
        assert torch.equal(anchoring.between(p, other, theta).exp(), p.exp())


@pytest.mark.oracle("anchored")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler[0])
def test_the_bound_holds_for_samplers_that_make_supports_disjoint(sampler):
    models, prompt = {"target": TableModel("abcd", seed=2), "draft": TableModel("abcd", seed=5)}, [0, 1]
    safe = law(LaneConfig("greedy", {}, [("temperature", {"t": 1.0}), sampler]), {"target": models["draft"]}, prompt, 3)
    for k in (0.1, 0.8):
        found = law(LaneConfig("anchored", {"k": k, "debt": False}, [sampler]), models, prompt, 3)
        assert sum(found.values()) == pytest.approx(1) and set(found) <= set(safe)
        assert kl(found, safe) <= 3 * k + 1e-9


def debt_by_hand(models: dict, prompt: list[int], count: int) -> float:
    gains = []
    for end in range(1, len(prompt)):
        risky, safe = (
            models[name].scores(tuple(prompt[:end])).log_softmax(-1)[prompt[end]] for name in ("target", "draft")
        )
        gains.append(max(0.0, float(risky - safe)))
    return sum(sorted(gains)[-count:]) / count


WRONG = {
    "divergence the wrong way round": lambda q, p, right=anchoring.divergence: right(p, q),
    "half of what is spent": lambda q, p, right=anchoring.divergence: right(q, p) / 2,
    "the largest difference alone": lambda q, p: max(0.0, float((q.exp() * (q - p)).max())) / 2,
}


@pytest.mark.slow
@pytest.mark.refuses("anchored")
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_budget_account_breaks_the_bound(wrong, monkeypatch):
    monkeypatch.setattr(anchoring, "divergence", wrong)
    over = []
    for seed in range(4):
        models, prompt = (
            {"target": TableModel("abcd", seed=seed), "draft": TableModel("abcd", seed=seed + 9)},
            [0, 1, 3, 2],
        )
        over.append(
            kl(law(anchored(k=0.3, debt=False), models, prompt, 2), product_law(models["draft"], prompt, 2)) - 0.6
        )
    assert max(over) > 1e-3


def test_unspent_budget_is_saved_and_no_step_exceeds_it():
    models = {"target": TableModel("abcd", seed=2), "draft": TableModel("abcd", seed=5)}
    _, events = run(anchored(k=0.2, debt=False), models, [0, 1], 12)
    account, spent = [data["series"] for data in figures(events, "account, nats")], 0.0
    for step, entry in enumerate(account, 1):
        assert entry["budget"] == pytest.approx(0.2 * step - spent)
        spent += entry["spent on this token"]
        assert spent <= 0.2 * step + 1e-9 and entry["left"] == pytest.approx(0.2 * step - spent)
    assert max(entry["spent on this token"] for entry in account) > 0.2  # some step spent the savings of earlier ones


def test_a_prompt_memorised_by_the_risky_model_starts_in_debt_and_the_safe_model_writes_until_it_is_paid():
    by_heart = TableModel("abcd", rule=lambda text: torch.eye(4, dtype=torch.float64)[(text[-1] + 1) % 4] * 4)
    models = {"target": by_heart, "draft": TableModel("abcd", seed=5, spread=0.1)}
    _, events = run(anchored(k=0.3), models, [0, 1, 2, 3, 0, 1], 8)
    owed = debt_by_hand(models, [0, 1, 2, 3, 0, 1], 5)
    thetas = [data["series"]["theta"] for data in figures(events, "from safe (0) to risky (1)")]
    assert owed > 1 and [theta == 0 for theta in thetas] == [0.3 * (step + 1) <= owed for step in range(8)]
    assert f"{owed:.2f} nats" in next(event.text for event in events if isinstance(event, Note))


def test_the_debt_is_the_mean_of_the_largest_gains_with_missing_ones_counted_as_zero():
    assert anchoring.debt([3.0, -1.0, 1.0, 2.0], 2, 5) == 2.5
    assert anchoring.debt([3.0, -1.0], 5, 6) == pytest.approx(0.6)
    assert anchoring.debt([], 5, 1) == 0.0


def test_temperature_applies_to_both_models_before_they_are_combined():
    models, prompt = {"target": TableModel("abc", seed=2), "draft": TableModel("abc", seed=5)}, [0, 1]
    found = law(anchored(k=0.0, t=0.5), models, prompt, 2)
    assert distance(found, product_law(models["draft"], prompt, 2, lambda scores, history: scores / 0.5)) < 1e-9


Anchored = find("anchored")


def divergence(q: list[float], p: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(q, p) if a > 0)


def between(p: list[float], r: list[float], theta: float) -> list[float]:
    weights = [a ** (1 - theta) * b**theta for a, b in zip(p, r)]
    return [weight / sum(weights) for weight in weights]


def paid(p: list[float], r: list[float], budget: float) -> list[float]:
    """The distribution p^(1 - theta) r^theta of the largest theta within the budget, by bisection."""
    low, high = 0.0, 1.0
    if divergence(r, p) <= budget:
        return r
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(between(p, r, middle), p) <= budget else (low, middle)
    return between(p, r, low)


def owed(models: dict[str, TableModel], prompt: list[int], count: int) -> float:
    """The mean of the `count` largest gains of the risky model over the safe one on the prompt, those below 0 as 0."""
    gains = []
    for i in range(1, len(prompt)):
        risky, safe = (
            models[name].scores(tuple(prompt[:i])).log_softmax(-1)[prompt[i]] for name in ("target", "draft")
        )
        gains.append(max(0.0, float(risky - safe)))
    return sum(sorted(gains)[-count:]) / min(count, len(prompt) - 1)


def anchored_law(models: dict[str, TableModel], prompt: list[int], length: int, k: float, debt: float) -> Law:
    """Token by token: k nats are added, the step's divergence is spent, and the rest is saved."""
    found, accounts = {(): 1.0}, {(): -debt}
    for _ in range(length):
        longer = {}
        for text, chance in found.items():
            r, p = (models[name].scores((*prompt, *text)).softmax(-1).tolist() for name in ("target", "draft"))
            step = paid(p, r, max(0.0, accounts[text] + k)) if accounts[text] + k > 0 else p
            for token, q in enumerate(step):
                longer[(*text, token)] = chance * q
                accounts[(*text, token)] = accounts[text] + k - divergence(step, p)
        found = longer
    return found


def check_anchored(cls: type[Decoder]) -> None:
    for seed, k, debt, count in ((2, 0.1, False, 5), (3, 0.3, True, 2), (4, 0.6, True, 5)):
        models = {"target": TableModel("abc", seed=seed), "draft": TableModel("abc", seed=seed + 9)}
        prompt = [0, 1, 2, 1]
        found = law(lane_of(cls(k=k, debt=debt, n=count, t=1.0)), models, prompt, 2)
        expected = anchored_law(models, prompt, 2, k, owed(models, prompt, count) if debt else 0.0)
        assert distance(found, expected) < 1e-6


class SpendsNothing(Anchored):
    """Always samples from the safe model."""

    def __post_init__(self):
        self.k = 0.0


class StartsWithoutDebt(Anchored):
    def __post_init__(self):
        self.debt = False


class OneTokenOfThePromptDecides(Anchored):
    def __post_init__(self):
        self.n = 1


WRONG_PRICES = {
    "the divergence the other way round": lambda q, p, right=anchored_module.divergence: right(p, q),
    "half of what is spent": lambda q, p, right=anchored_module.divergence: right(q, p) / 2,
}


@pytest.mark.oracle("anchored")
def test_anchored_decoding_spends_its_budget_token_by_token():
    check_anchored(Anchored)


@pytest.mark.refuses("anchored")
@pytest.mark.parametrize("wrong", [SpendsNothing, StartsWithoutDebt, OneTokenOfThePromptDecides])
def test_a_wrong_anchored_decoding_is_refused(wrong):
    refused(check_anchored, wrong)


@pytest.mark.refuses("anchored")
@pytest.mark.parametrize("price", WRONG_PRICES.values(), ids=WRONG_PRICES)
def test_anchored_decoding_with_a_wrong_price_is_refused(price, monkeypatch):
    monkeypatch.setattr(anchored_module, "divergence", price)
    refused(check_anchored, Anchored)


@pytest.mark.refuses("anchored")
def test_an_anchored_decoding_that_mixes_probabilities_is_refused(monkeypatch):
    def mixture(p: Tensor, r: Tensor, theta: float) -> Tensor:
        return ((1 - theta) * p.exp() + theta * r.exp()).log()

    monkeypatch.setattr(anchored_module, "between", mixture)
    refused(check_anchored, Anchored)
