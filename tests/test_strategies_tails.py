"""Top-a, tail-free sampling, dynamic temperature and llama.cpp's order, against their formulas in plain loops."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from registry import Collapse
from runs import alone
from tables import TableModel, distance, law, product_law
from torch import Tensor

from playground.contract import Decoder, Sampler, find, make
from playground.contract.lane_config import Assembly, LaneConfig
from playground.errors import Refusal
from support.laws import AT_ONE, EXACT

TopA, TailFree, Dynamic, LlamaCpp = (find(name) for name in ("top_a", "tail_free", "dynamic_temperature", "llama_cpp"))
AT_TEMPERATURE_ONE = LaneConfig("greedy", {}, [AT_ONE])
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
COLLAPSES = {
    "top_a": [Collapse(LaneConfig("greedy", {}, [("top_a", {"a": 0.0}), AT_ONE]), AT_TEMPERATURE_ONE)],
    "tail_free": [Collapse(LaneConfig("greedy", {}, [("tail_free", {"z": 1.0}), AT_ONE]), AT_TEMPERATURE_ONE)],
    "dynamic_temperature": [
        Collapse(alone("dynamic_temperature", low=0.7, high=0.7), alone("temperature", t=0.7)),
        Collapse(alone("dynamic_temperature", low=0.0, high=0.0), LaneConfig("greedy")),
    ],
    "llama_cpp": [
        Collapse(LaneConfig("llama_cpp", NEUTRAL), LaneConfig("sample", {"top_p": 1.0})),
        Collapse(LaneConfig("llama_cpp", {"temperature": 0.0}), LaneConfig("greedy")),
    ],
}
REMOVED = -math.inf
V = 12
Row = list[float]


def rows() -> Tensor:
    """Random rows, steep and flat ones, rows with removed tokens, and one of equal scores."""
    scores = torch.randn(40, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = torch.cat([scores * 0.3, scores, scores * 4, torch.zeros(1, V, dtype=torch.float64)])
    scores[1::4, 3:8] = REMOVED
    return scores


def softmax(row: Row) -> Row:
    weights = [math.exp(score - max(row)) for score in row]
    return [weight / sum(weights) for weight in weights]


def kept(sampler: Sampler) -> list[set[int]]:
    left = sampler.apply(rows(), [[]] * len(rows()))
    return [{token for token in range(V) if row[token] > REMOVED} for row in left.tolist()]


def alive(row: Row, keep: set[int]) -> set[int]:
    return {token for token in keep if row[token] > REMOVED}


def refused(check: Callable, wrong: type) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


# --- top-a ---


def check_top_a(cls: type[Sampler]) -> None:
    for a in (0.0, 0.1, 0.4, 1.0):
        expected = []
        for row in rows().tolist():
            p = softmax(row)
            expected.append(alive(row, {t for t in range(V) if p[t] >= a * max(p) ** 2}))
        assert kept(cls(a=a)) == expected, a


class IsMinP(TopA):
    def apply(self, scores, histories):
        return make("min_p", m=self.a).apply(scores, histories)


class SquaresTheFactor(TopA):
    def __post_init__(self):
        self.a = self.a ** 2


@pytest.mark.oracle("top_a")
def test_top_a_keeps_what_reaches_a_times_the_squared_maximum():
    check_top_a(TopA)


@pytest.mark.refuses("top_a")
@pytest.mark.parametrize("wrong", [IsMinP, SquaresTheFactor])
def test_a_wrong_top_a_is_refused(wrong):
    refused(check_top_a, wrong)


# --- tail-free ---


def before_the_tail(row: Row, z: float) -> set[int]:
    """Sorted probabilities, first and second differences, and the sum of the latter's share up to each token."""
    p = softmax(row)
    order = sorted(range(V), key=lambda token: (-p[token], token))
    first = [p[order[i + 1]] - p[order[i]] for i in range(V - 1)]
    second = [abs(first[i + 1] - first[i]) for i in range(V - 2)]
    if z >= 1 or sum(second) == 0:
        return alive(row, set(order))
    found, so_far = {order[0]}, 0.0
    for i, bend in enumerate(second):
        so_far += bend
        if so_far > z * sum(second):
            break
        found.add(order[i + 1])
    return alive(row, found)


def check_tail_free(cls: type[Sampler]) -> None:
    for z in (0.0, 0.25, 0.6, 0.95, 1.0):
        assert kept(cls(z=z)) == [before_the_tail(row, z) for row in rows().tolist()], z


class FirstDifferences(TailFree):
    def apply(self, scores, histories):
        p, order = scores.softmax(-1).sort(descending=True, stable=True)
        fall = p.diff().abs()
        tail = torch.zeros_like(p, dtype=torch.bool)
        tail[:, 1:] = fall.cumsum(-1) > self.z * fall.sum(-1, keepdim=True)
        return scores.masked_fill(tail.scatter(-1, order, tail.clone()), REMOVED)


class OneTokenFurther(TailFree):
    """Keeps one token behind the bend."""

    def apply(self, scores, histories):
        order = scores.argsort(descending=True, stable=True)
        left = (super().apply(scores, histories) > REMOVED).gather(-1, order)
        left = torch.cat([torch.ones_like(left[:, :1]), left[:, :-1]], -1)
        return scores.masked_fill(~left.scatter(-1, order, left.clone()), REMOVED)


@pytest.mark.oracle("tail_free")
def test_tail_free_sampling_ends_where_the_curve_has_become_flat():
    check_tail_free(TailFree)


@pytest.mark.refuses("tail_free")
@pytest.mark.parametrize("wrong", [FirstDifferences, OneTokenFurther])
def test_a_wrong_tail_is_refused(wrong):
    refused(check_tail_free, wrong)


# --- dynamic temperature ---


def entropy(p: Row) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


def check_dynamic(cls: type[Sampler]) -> None:
    for low, high, exponent in ((0.3, 1.3, 1.0), (0.5, 2.0, 3.0), (1.0, 1.0, 0.5)):
        found = cls(low=low, high=high, exponent=exponent).apply(rows(), [[]] * len(rows()))
        for row, new in zip(rows().tolist(), found.tolist()):
            left = [score for score in row if score > REMOVED]
            share = entropy(softmax(left)) / math.log(len(left))
            t = low + (high - low) * share**exponent
            assert new == pytest.approx([score / t for score in row])


class ByTheWholeVocabulary(Dynamic):
    def temperatures(self, scores):
        return super().temperatures(scores.clamp(min=-1e4))


class HotWhereCertain(Dynamic):
    def temperatures(self, scores):
        return self.low + self.high - super().temperatures(scores)


@pytest.mark.oracle("dynamic_temperature")
def test_the_temperature_rises_with_the_entropy_of_what_is_left():
    check_dynamic(Dynamic)


@pytest.mark.refuses("dynamic_temperature")
@pytest.mark.parametrize("wrong", [ByTheWholeVocabulary, HotWhereCertain])
def test_a_wrong_temperature_is_refused(wrong):
    refused(check_dynamic, wrong)


def test_a_row_of_one_token_stays_finite_and_crossed_limits_are_refused():
    row = torch.tensor([[1.0, REMOVED, REMOVED]])
    assert Dynamic(low=0.0).apply(row, [[]]).isfinite().sum() == 1
    with pytest.raises(Refusal, match="low must not exceed high"):
        make("dynamic_temperature", low=2.0, high=1.0)


# --- llama.cpp's order ---

SETTINGS = [
    {"temperature": 1.7, "top_k": 4, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.3, "repeat_penalty": 1.5, "repeat_last_n": 2},
    {"temperature": 3.0, "top_k": 5, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 1.2, "presence_penalty": 1.0,
     "frequency_penalty": 0.5, "repeat_last_n": 3},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.9, "frequency_penalty": 1.0,
     "repeat_last_n": 0},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.9, "frequency_penalty": 1.0,
     "repeat_last_n": -1},
    {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0, "dry_multiplier": 0.9, "dry_base": 1.5,
     "dry_allowed_length": 1},
    {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0, "dry_multiplier": 0.9, "dry_allowed_length": 1,
     "dry_penalty_last_n": 3},
    {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0, "dry_multiplier": 0.9, "dry_allowed_length": 1,
     "dry_penalty_last_n": 0},
    {"temperature": 1.2, "top_k": 4, "top_p": 1.0, "min_p": 0.0, "dynatemp_range": 0.7, "dynatemp_exponent": 1.5},
    {"temperature": 0.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "dynatemp_range": 0.5, "typical_p": 0.6},
]


def llama_row(scores: Tensor, history: list[int], s: dict) -> Tensor:
    """llama.cpp's samplers one after the other, on a list of (score, token) in descending order."""
    window, logits = last(history, s.get("repeat_last_n", 64)), scores.tolist()
    for token in set(window):
        times, r = window.count(token), s.get("repeat_penalty", 1.0)
        logits[token] = logits[token] * r if logits[token] <= 0 else logits[token] / r
        logits[token] -= times * s.get("frequency_penalty", 0.0) + s.get("presence_penalty", 0.0)
    for token, length in repeated(last(history, s.get("dry_penalty_last_n", -1))).items():
        if length >= (allowed := s.get("dry_allowed_length", 2)):
            logits[token] -= s.get("dry_multiplier", 0.0) * s.get("dry_base", 1.75) ** (length - allowed)
    left = sorted(((score, token) for token, score in enumerate(logits)), key=lambda pair: -pair[0])
    if s.get("top_n_sigma"):
        mean = sum(score for score, _ in left) / len(left)
        deviation = math.sqrt(sum((score - mean) ** 2 for score, _ in left) / len(left))
        left = [pair for pair in left if pair[0] >= left[0][0] - s["top_n_sigma"] * deviation]
    left = left[:s["top_k"] or None]
    if s.get("typical_p", 1.0) < 1:
        p = softmax([score for score, _ in left])
        mean = -sum(share * math.log(share) for share in p)
        nearest, total = sorted(range(len(p)), key=lambda i: abs(-math.log(p[i]) - mean)), 0.0
        for count, i in enumerate(nearest, 1):
            total += p[i]
            if total > s["typical_p"]:
                left = sorted((left[i] for i in nearest[:count]), key=lambda pair: -pair[0])
                break
    p, total = softmax([score for score, _ in left]), 0.0
    for i, share in enumerate(p):
        total += share
        if total >= s["top_p"]:
            left = left[:i + 1]
            break
    left = [pair for pair in left if s["min_p"] <= 0 or pair[0] >= left[0][0] + math.log(s["min_p"])]
    row = torch.full_like(scores, REMOVED)
    for score, token in left:
        row[token] = score / llama_temperature([score for score, _ in left], s)
    return row


def last(history: list[int], n: int) -> list[int]:
    """The last n tokens: none for 0, all for -1."""
    return history if n == -1 else history[len(history) - n:] if n else []


def repeated(window: list[int]) -> dict[int, int]:
    """For each token, the longest ending of the window that it has followed before; no token here is a breaker."""
    found: dict[int, int] = {}
    for place in range(1, len(window)):
        length = max(n for n in range(place + 1) if window[place - n:place] == window[len(window) - n:])
        if length:
            found[window[place]] = max(found.get(window[place], 0), length)
    return found


def llama_temperature(left: Row, s: dict) -> float:
    if not (spread := s.get("dynatemp_range", 0.0)) or len(left) < 2:
        return s["temperature"]
    low, high = max(0.0, s["temperature"] - spread), s["temperature"] + spread
    entropy = -sum(p * math.log(p) for p in softmax(left))
    return low + (high - low) * (entropy / math.log(len(left))) ** s.get("dynatemp_exponent", 1.0)


def check_llama(cls: type[Decoder]) -> None:
    for seed, settings in enumerate(SETTINGS):
        model, decoder = TableModel("abcdef", seed=seed), cls(**settings)
        assembly = Assembly(decoder, decoder.toggles())
        assembly.samplers.sort(key=lambda one: (("penalty", "temperature", "truncation").index(one.stage), one.rank))
        expected = product_law(model, [0, 1, 1], 2, lambda scores, history, s=settings: llama_row(scores, history, s))
        assert distance(law(assembly, {"target": model}, [0, 1, 1], 2), expected) < EXACT


class TemperatureFirst(LlamaCpp):
    def toggles(self):
        chain = super().toggles()
        chain[-1].place = "before cuts"
        return chain


class MinPFirst(LlamaCpp):
    def toggles(self):
        chain = super().toggles()
        for sampler in chain:
            sampler.rank = -1 if sampler.name == "min_p" else 99 if sampler.name == "top_p" else sampler.rank
            sampler.rank = 100 if sampler.name == "temperature" else sampler.rank
        return chain


class PenalisesTheWholeText(LlamaCpp):
    def __post_init__(self):
        self.repeat_last_n = -1


class TakesNoneForAll(LlamaCpp):
    """As it was here: 0 stood for all tokens."""

    def __post_init__(self):
        self.repeat_last_n = self.repeat_last_n or -1


class SearchesAllForRepeats(LlamaCpp):
    def __post_init__(self):
        self.dry_penalty_last_n = -1


@pytest.mark.oracle("llama_cpp")
def test_the_law_is_that_of_llama_cpps_samplers_in_their_order():
    check_llama(LlamaCpp)


@pytest.mark.refuses("llama_cpp")
@pytest.mark.parametrize("wrong", [
    TemperatureFirst, MinPFirst, PenalisesTheWholeText, TakesNoneForAll, SearchesAllForRepeats
])
def test_another_order_is_refused(wrong):
    refused(check_llama, wrong)


def test_every_sampler_of_the_chain_is_where_llama_cpp_has_it():
    names = [sampler.name for sampler in LlamaCpp(top_n_sigma=1.0).toggles()]
    assert names == ["repetition_penalty", "frequency_penalty", "presence_penalty", "dry", "top_n_sigma", "top_k",
                     "typical", "top_p", "min_p", "xtc", "temperature"]


def test_mirostat_takes_the_place_of_all_but_the_temperature():
    chain = LlamaCpp(mirostat="1", repeat_penalty=1.5, temperature=0.7, mirostat_tau=4.0).toggles()
    assert [sampler.name for sampler in chain] == ["temperature", "mirostat"]
    assert (chain[0].t, chain[1].version, chain[1].tau, chain[1].eta, chain[1].ranks) == (0.7, "1", 4.0, 0.1, 100)
    assert chain[1].surprise == "renormalised"  # there, of the candidates that are left


def test_a_threshold_above_one_half_turns_xtc_off():
    assert "xtc" not in [sampler.name for sampler in LlamaCpp(xtc_probability=1.0, xtc_threshold=0.6).toggles()]
