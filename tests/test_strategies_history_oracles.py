"""Samplers that depend on the text: penalties, DRY, momentum and mirostat, each against its formula in plain loops.

Every strategy has one `check_...(cls)`, written without its code. The strategy passes it, and subclasses with one
mistake fail it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from playground.contract import Sampler, find

DRY, Frequency, Mirostat, Momentum, NoRepeatNgram, Presence = (
    find(name) for name in ("dry", "frequency_penalty", "mirostat", "momentum", "no_repeat_ngram", "presence_penalty")
)
REMOVED = -math.inf
V = 6  # letters a to f
BREAKER = 5  # the last letter


def texts(count: int = 80, letters: int = 4, longest: int = 20, seed: int = 0) -> list[list[int]]:
    """Random texts of few letters, so that they repeat themselves; none is empty."""
    chance = random.Random(seed)
    return [[chance.randrange(letters) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def scores_for(seed: int) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(cls: type[Sampler], start: int = 0, **knobs) -> Sampler:
    """A sampler that knows where its prompt of `start` tokens ends, and how tokens read."""
    sampler = cls(**knobs)
    sampler.begin(start, lambda token: "abcdef"[token])
    return sampler


def applied(cls: type[Sampler], text: list[int], scores: Tensor, start: int = 0, **knobs) -> list[float]:
    return made(cls, start, **knobs).apply(scores[None], [text])[0].tolist()


def refused(check: Callable, wrong: type[Sampler]) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


# --- frequency and presence ---


def check_counts(cls: type[Sampler], cost: Callable[[int], int]) -> None:
    """s_v - penalty * cost(occurrences of v), counted in the window, and in the prompt on request only."""
    for number, text in enumerate(texts()):
        start, scores = len(text) // 2, scores_for(number)
        for window, prompt in ((0, False), (0, True), (3, True), (5, False)):
            first = max(0 if prompt else start, len(text) - window if window else 0)
            expected = [float(scores[v]) - 0.7 * cost(text[first:].count(v)) for v in range(V)]
            found = applied(cls, text, scores, start, penalty=0.7, window=window, prompt=prompt)
            assert found == pytest.approx(expected)


def check_frequency(cls: type[Sampler]) -> None:
    check_counts(cls, lambda count: count)


def check_presence(cls: type[Sampler]) -> None:
    check_counts(cls, lambda count: min(count, 1))


class WindowOneShort:
    def apply(self, scores, histories):
        self.window = max(self.window - 1, 0)
        return super().apply(scores, histories)


class CountsThePrompt:
    def apply(self, scores, histories):
        self.prompt = True
        return super().apply(scores, histories)


class Divides:
    def apply(self, scores, histories):
        kept = super().apply(scores, histories) == scores
        return torch.where(kept, scores, scores / (1 + self.penalty))


class FrequencyWithAShortWindow(WindowOneShort, Frequency): ...


class FrequencyOfThePrompt(CountsThePrompt, Frequency): ...


class FrequencyThatDivides(Divides, Frequency): ...


class PresenceWithAShortWindow(WindowOneShort, Presence): ...


class PresenceInThePrompt(CountsThePrompt, Presence): ...


@pytest.mark.oracle("frequency_penalty")
def test_the_frequency_penalty_is_paid_for_each_occurrence():
    check_frequency(Frequency)


@pytest.mark.refuses("frequency_penalty")
@pytest.mark.parametrize("wrong", [Presence, FrequencyWithAShortWindow, FrequencyOfThePrompt, FrequencyThatDivides])
def test_a_wrong_frequency_penalty_is_refused(wrong):
    refused(check_frequency, wrong)


@pytest.mark.oracle("presence_penalty")
def test_the_presence_penalty_is_paid_once():
    check_presence(Presence)


@pytest.mark.refuses("presence_penalty")
@pytest.mark.parametrize("wrong", [Frequency, PresenceWithAShortWindow, PresenceInThePrompt])
def test_a_wrong_presence_penalty_is_refused(wrong):
    refused(check_presence, wrong)


# --- no repeated n-grams ---


def check_no_repeat_ngram(cls: type[Sampler]) -> None:
    for n in (1, 2, 3, 4):
        for number, text in enumerate(texts(letters=4)):  # two letters are always left
            scores = scores_for(number)
            library = NoRepeatNGramLogitsProcessor(n)(torch.tensor([text]), scores[None])[0]
            assert applied(cls, text, scores, len(text) // 2, n=n) == library.tolist()
    assert applied(cls, [0, 0, 0], scores_for(0), n=0) == scores_for(0).tolist()


class OneTokenLonger(NoRepeatNgram):
    def banned(self, history):
        self.n += 1
        try:
            return super().banned(history)
        finally:
            self.n -= 1


class ForgetsThePrompt(NoRepeatNgram):
    def banned(self, history):
        return super().banned(history[self.start :])


class OnlyTheLastPlace(NoRepeatNgram):
    """Removes only the continuation of the last occurrence of the n-gram's prefix."""

    def banned(self, history):
        found = super().banned(history)
        last = max(found, key=lambda token: len(history) - history[::-1].index(token), default=None)
        return {last: found[last]} if found else {}


@pytest.mark.oracle("no_repeat_ngram")
def test_no_repeat_ngram_removes_what_the_library_removes():
    check_no_repeat_ngram(NoRepeatNgram)


@pytest.mark.refuses("no_repeat_ngram")
@pytest.mark.parametrize("wrong", [OneTokenLonger, ForgetsThePrompt, OnlyTheLastPlace])
def test_a_wrong_no_repeat_ngram_is_refused(wrong):
    refused(check_no_repeat_ngram, wrong)


# --- DRY ---


def dry_by_definition(text: list[int], allowed: int, breaker: int | None) -> list[float]:
    """Penalties [V]: from every earlier position of the last token, how far back the text agrees with its end."""
    longest = [0] * V
    for i in range(len(text) - 1):
        length = 0
        while length <= i and text[i - length] == text[-1 - length] != breaker:
            length += 1
        if text[i + 1] != breaker:
            longest[text[i + 1]] = max(longest[text[i + 1]], length)
    return [0.8 * 1.75 ** (length - allowed) if length >= allowed else 0.0 for length in longest]


def check_dry(cls: type[Sampler]) -> None:
    cases = [*texts(), *texts(letters=2, seed=1), *texts(letters=V, longest=40, seed=2), [0, 1, 5, 2] * 4]
    for number, text in enumerate(cases):
        for allowed, breakers, breaker in ((1, "", None), (2, "f", BREAKER), (3, "", None)):
            scores = scores_for(number)
            found = applied(cls, text, scores, multiplier=0.8, base=1.75, allowed=allowed, breakers=breakers)
            penalties = dry_by_definition(text, allowed, breaker)
            assert found == pytest.approx((scores - torch.tensor(penalties, dtype=torch.float64)).tolist())


class CountsTheTokenItself(DRY):
    def penalty(self, length):
        return super().penalty(length + 1)


class StartsOneLater(DRY):
    def repeats(self, history):
        return {token: length for token, length in super().repeats(history).items() if length > self.allowed}


class ReachesAcrossBreakers(DRY):
    def _unbroken(self, history):
        return len(history)


class PunishesBreakers(DRY):
    """Breaks repeats at breakers, but penalises breakers themselves."""

    def repeats(self, history):
        unbroken, self._breaks = self._unbroken(history), lambda token: False
        self._unbroken = lambda searched: unbroken
        return super().repeats(history)


@pytest.mark.oracle("dry")
def test_dry_penalises_a_repeat_by_its_length():
    check_dry(DRY)


@pytest.mark.refuses("dry")
@pytest.mark.parametrize("wrong", [CountsTheTokenItself, StartsOneLater, ReachesAcrossBreakers, PunishesBreakers])
def test_a_wrong_dry_is_refused(wrong):
    refused(check_dry, wrong)


# --- momentum ---

RESISTANCE = [1.0, 3.0, 4.0, 5.0, 5.0]


def repeat(text: list[int], token: int) -> int:
    """Tokens of the longest n-gram, of five at most, that a token would repeat, itself included; 0 where it is new."""
    whole, ends = [*text, token], range(1, len(text) + 1)
    return max((n for n in range(1, 6) if any(text[max(end - n, 0) : end] == whole[-n:] for end in ends)), default=0)


def check_momentum(cls: type[Sampler]) -> None:
    """Of the k most probable tokens the one of the largest p - alpha * resistance; no other can be sampled."""
    for number, text in enumerate(texts(200, letters=V)):
        p = scores_for(number).softmax(-1).tolist()
        best = sorted(range(V), key=lambda token: -p[token])[:3]
        worth = {token: p[token] - 0.2 * [0.0, *RESISTANCE][repeat(text, token)] for token in best}
        found = applied(cls, text, scores_for(number), k=3, alpha=0.2)
        assert {v for v in range(V) if found[v] > REMOVED} == set(best)
        assert sorted(best, key=lambda token: -found[token]) == sorted(best, key=lambda token: -worth[token])
        assert all(math.exp(found[v]) == pytest.approx(worth[v]) for v in best if worth[v] > 1e-3)


class OneLengthTooEarly(Momentum):
    def _costs(self, depths):
        return super()._costs([min(depth + 1, len(RESISTANCE)) if depth else 0 for depth in depths])


class NewTokensPayToo(Momentum):
    def _costs(self, depths):
        return self.resistances()[:1] * len(depths) if not any(depths) else super()._costs([d or 1 for d in depths])


class ForgetsTheLastToken(Momentum):
    def candidates(self, row, history):
        return super().candidates(row, history[:-1])


class OneCandidateMore(Momentum):
    def candidates(self, row, history):
        self.k = 4
        return super().candidates(row, history)


@pytest.mark.oracle("momentum")
def test_momentum_penalises_each_candidate_by_the_repeat_it_would_complete():
    check_momentum(Momentum)


@pytest.mark.refuses("momentum")
@pytest.mark.parametrize("wrong", [OneLengthTooEarly, NewTokensPayToo, ForgetsTheLastToken, OneCandidateMore])
def test_a_wrong_momentum_is_refused(wrong):
    refused(check_momentum, wrong)


# --- mirostat ---


def surprises(row: list[float]) -> list[float]:
    """Bits of each token of a row of scores."""
    total = sum(map(math.exp, row))
    return [-math.log2(math.exp(score) / total) if score > REMOVED else math.inf for score in row]


def zipf_k(row: list[float], mu: float, ranks: int) -> int:
    """The paper's k: s by least squares over neighbouring ranks, then k = (eps 2^mu / (1 - N^-eps)) ^ (1 / s)."""
    p = sorted((math.exp(score) for score in row if score > REMOVED), reverse=True)
    steps = [(math.log((i + 1) / i), math.log(p[i - 1] / p[i])) for i in range(1, min(ranks, len(p) - 1) + 1)]
    s = sum(t * b for t, b in steps) / sum(t * t for t, _ in steps)
    eps = s - 1
    return max(1, min(round((eps * 2**mu / (1 - len(p) ** -eps)) ** (1 / s)), len(p)))


def allowed_tokens(row: list[float], mu: float, version: str, ranks: int) -> set[int]:
    order = sorted((v for v in range(len(row)) if row[v] > REMOVED), key=lambda v: -row[v])
    if version == "1":
        return set(order[: zipf_k(row, mu, ranks)])
    return {v for v in order if surprises(row)[v] <= mu} | {order[0]}


def check_mirostat(cls: type[Sampler]) -> None:
    """Along a text: the tokens allowed at mu, and mu after each token, mu -= eta (surprise - tau) from 2 tau on."""
    chance = torch.Generator().manual_seed(0)
    for version, judged in (("1", "full"), ("2", "full"), ("2", "renormalised")):
        sampler, mu = made(cls, version=version, tau=2.0, eta=0.4, surprise=judged, ranks=10), 4.0
        for position in range(25):
            scores = torch.randn(40, generator=chance, dtype=torch.float64) * 2
            row = scores.masked_fill(torch.rand(40, generator=chance) < 0.2, REMOVED).tolist()
            allowed = allowed_tokens(row, mu, version, 10)
            found = sampler.apply(torch.tensor([row], dtype=torch.float64), [[]])[0]
            assert {v for v in range(40) if found[v] > REMOVED} == allowed
            token = sorted(allowed)[position % len(allowed)]
            whole = row if judged == "full" else [score if v in allowed else REMOVED for v, score in enumerate(row)]
            list(sampler.observe({"target": torch.tensor(row, dtype=torch.float64)}, token, position))
            mu -= 0.4 * (surprises(whole)[token] - 2.0)
            assert sampler.mu == pytest.approx(mu, abs=1e-9)


class CutsInNats(Mirostat):
    def kept(self, scores):
        best = scores.argmax(-1, keepdim=True)
        nats = (-scores.log_softmax(-1) <= self.mu).scatter(-1, best, True)
        return nats if self.version == "2" else super().kept(scores)


class StartsAtTheTarget(Mirostat):
    def __post_init__(self):
        super().__post_init__()
        self.mu = self.tau


class CorrectsTheWrongWay(Mirostat):
    def observe(self, rows, token, position):
        before = self.mu
        yield from super().observe(rows, token, position)
        self.mu = 2 * before - self.mu


class ForgetsTheFullRow(Mirostat):
    """Always takes the surprise under the truncated distribution."""

    def observe(self, rows, token, position):
        self.surprise = "renormalised"
        return super().observe(rows, token, position)


@pytest.mark.oracle("mirostat")
def test_mirostat_equals_its_formulas_token_by_token():
    check_mirostat(Mirostat)


@pytest.mark.refuses("mirostat")
@pytest.mark.parametrize("wrong", [CutsInNats, StartsAtTheTarget, CorrectsTheWrongWay, ForgetsTheFullRow])
def test_a_wrong_mirostat_is_refused(wrong):
    refused(check_mirostat, wrong)
