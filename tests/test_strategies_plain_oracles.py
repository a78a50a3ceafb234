"""Decoders that write one text: greedy, sampling and anchored decoding against the model's rows, computed one by one.

Every strategy has one `check_...(cls)`, written without its code. The strategy passes it, and subclasses with one
mistake fail it. Distributions of texts are exact: `tables.law` sums over every random outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pairs import greedy_text, pair
from runs import run
from tables import Law, TableModel, Text, distance, law
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from playground.contract import Decoder, find
from playground.contract.lane_config import Assembly
from strategies.sampling import anchored as anchored_module

Anchored, Greedy, Sample = (find(name) for name in ("anchored", "greedy", "sample"))


def refused(check: Callable, wrong: type[Decoder]) -> None:
    with pytest.raises(AssertionError) as found:
        check(wrong)
    assert "Failed(" not in str(found.value), "a variant that breaks off proves nothing"


def lane_of(decoder: Decoder) -> Assembly:
    return Assembly(decoder, decoder.toggles())


# --- greedy ---


def check_greedy(cls: type[Decoder]) -> None:
    """The library's own argmax on a network; on a table the largest score, the lowest id where two are equal."""
    prompt = [54, 71, 71, 54, 9]
    lane, _ = run(Assembly(cls()), {"target": pair().target}, prompt, 8)
    assert lane.main.written == greedy_text("llama", prompt, 8)
    for seed in range(4):
        opinions = TableModel("abcde", seed=seed)
        table = TableModel("abcde", rule=lambda context, opinions=opinions: opinions.scores(context).round())
        text = [0, 1]
        for _ in range(12):
            row = table.scores(tuple(text)).tolist()
            text.append(row.index(max(row)))
        assert run(Assembly(cls()), {"target": table}, [0, 1], 12)[0].tokens == text


class PlainDecoder(Greedy):
    """The loop of greedy decoding with a choice of its own."""

    def decode(self, lm):
        rows = yield lm.prefill()
        while True:
            yield lm.keep(lm.choose(rows, self.chosen(rows.scores[-1])))
            rows = yield lm.extend()

    def chosen(self, row: Tensor) -> int:
        return int(row.argmax())


class LastOfEquals(PlainDecoder):
    def chosen(self, row):
        return len(row) - 1 - int(row.flip(0).argmax())


class SecondBest(PlainDecoder):
    def chosen(self, row):
        return int(row.topk(2).indices[1])


class ReadsOneRowTwice(Greedy):
    """Writes two tokens from one row: the second does not depend on the first."""

    def decode(self, lm):
        rows = yield lm.prefill()
        while True:
            yield lm.keep(lm.pick(rows))
            yield lm.keep(lm.pick(rows, purpose="again"))
            rows = yield lm.extend()


@pytest.mark.oracle("greedy")
def test_greedy_writes_the_librarys_argmax_and_breaks_ties_by_the_lowest_id():
    check_greedy(Greedy)


def test_the_loop_of_the_wrong_variants_is_greedy_itself():
    check_greedy(PlainDecoder)


@pytest.mark.refuses("greedy")
@pytest.mark.parametrize("wrong", [LastOfEquals, SecondBest, ReadsOneRowTwice])
def test_a_wrong_greedy_is_refused(wrong):
    refused(check_greedy, wrong)


# --- sampling ---


def text_law(rows: Callable[[Text], Tensor], prompt: list[int], length: int) -> Law:
    """Probability of every text of so many tokens, each token drawn from rows(text so far) [V]."""
    found: Law = {(): 1.0}
    for _ in range(length):
        following = [(text, p, rows((*prompt, *text)).softmax(-1).tolist()) for text, p in found.items()]
        found = {(*text, token): p * q for text, p, row in following for token, q in enumerate(row) if q > 0}
    return found


V = 6
SETTINGS = [  # of temperature, top_k, top_p, min_p and repetition_penalty
    (1.0, 0, 1.0, 0.0, 1.0),
    (1.6, 4, 0.75, 0.0, 1.4),
    (1.3, 2, 1.0, 0.0, 2.0),
    (0.7, 0, 0.9, 0.15, 0.8),
    (1.9, 3, 1.0, 0.3, 1.0),
]


def by_the_library(model: TableModel, t: float, k: int, p: float, m: float, r: float) -> Callable[[Text], Tensor]:
    """A row after the library's processors, in its order; a k of 0 keeps all."""
    chain = [RepetitionPenaltyLogitsProcessor(r), TemperatureLogitsWarper(t), TopKLogitsWarper(k or V)]
    chain += [TopPLogitsWarper(p), MinPLogitsWarper(m)]

    def row(text: Text) -> Tensor:
        scores = model.scores(text)[None]
        for processor in chain:
            scores = processor(torch.tensor([text]), scores)
        return scores[0]

    return row


def check_sample(cls: type[Decoder]) -> None:
    for seed, (t, k, p, m, r) in enumerate(SETTINGS):
        model = TableModel("abcdef"[:V], seed=seed)
        decoder = cls(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
        found = law(lane_of(decoder), {"target": model}, [0, 1, 2], 2)
        assert distance(found, text_law(by_the_library(model, t, k, p, m, r), [0, 1, 2], 2)) < 1e-9


class TemperatureLast(Sample):
    """Truncates rows first, as llama.cpp does."""

    def toggles(self):
        penalty, temperature, *cuts = super().toggles()
        return [penalty, *cuts, temperature]


class PenaltyAfterTopK(Sample):
    def toggles(self):
        penalty, temperature, top_k, *cuts = super().toggles()
        return [temperature, top_k, penalty, *cuts]


class ForgetsMinP(Sample):
    def toggles(self):
        return super().toggles()[:-1]


class DrawsWithoutReading(ReadsOneRowTwice, Sample): ...


@pytest.mark.oracle("sample")
def test_sampling_has_the_distribution_of_the_librarys_processors():
    check_sample(Sample)


@pytest.mark.refuses("sample")
@pytest.mark.parametrize("wrong", [TemperatureLast, PenaltyAfterTopK, ForgetsMinP, DrawsWithoutReading])
def test_a_wrong_sampling_is_refused(wrong):
    refused(check_sample, wrong)


# --- anchored decoding ---


def kl(q: list[float], p: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(q, p) if a > 0)


def between(p: list[float], r: list[float], theta: float) -> list[float]:
    weights = [a ** (1 - theta) * b**theta for a, b in zip(p, r)]
    return [weight / sum(weights) for weight in weights]


def paid(p: list[float], r: list[float], budget: float) -> list[float]:
    """The distribution p^(1 - theta) r^theta of the largest theta within the budget, by bisection."""
    low, high = 0.0, 1.0
    if kl(r, p) <= budget:
        return r
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(between(p, r, middle), p) <= budget else (low, middle)
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
                accounts[(*text, token)] = accounts[text] + k - kl(step, p)
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
