"""The order of llama.cpp against its formula in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from tables import TableModel, distance, law, product_law
from torch import Tensor

from playground.contract import Decoder, find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from support.laws import EXACT
from support.plain_rows import REMOVED, Row, softmax
from support.wrong_variants import refused

LlamaCpp = find("llama_cpp")
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
COLLAPSES = {
    "llama_cpp": [
        Collapse(LaneConfig("llama_cpp", NEUTRAL), LaneConfig("sample", {"top_p": 1.0})),
        Collapse(LaneConfig("llama_cpp", {"temperature": 0.0}), LaneConfig("greedy")),
        Collapse(
            LaneConfig("llama_cpp", {**NEUTRAL, "adaptive_target": 0.4, "adaptive_decay": 0.5}),
            LaneConfig("greedy", {}, [("temperature", {}), ("adaptive_p", {"target": 0.4, "decay": 0.5})]),
        ),
    ],
}
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


def test_adaptive_p_is_last_and_off_unless_it_has_a_target():
    chain = LlamaCpp(adaptive_target=0.3, adaptive_decay=0.8).toggles()
    assert [sampler.name for sampler in chain[-2:]] == ["temperature", "adaptive_p"]
    assert (chain[-1].target, chain[-1].decay) == (0.3, 0.8)
    assert "adaptive_p" not in [s.name for s in LlamaCpp(mirostat="2", adaptive_target=0.3).toggles()]


def test_mirostat_takes_the_place_of_all_but_the_temperature():
    chain = LlamaCpp(mirostat="1", repeat_penalty=1.5, temperature=0.7, mirostat_tau=4.0).toggles()
    assert [sampler.name for sampler in chain] == ["temperature", "mirostat"]
    assert (chain[0].t, chain[1].version, chain[1].tau, chain[1].eta, chain[1].ranks) == (0.7, "1", 4.0, 0.1, 100)
    assert chain[1].surprise == "renormalised"  # there, of the candidates that are left


def test_a_threshold_above_one_half_turns_xtc_off():
    assert "xtc" not in [sampler.name for sampler in LlamaCpp(xtc_probability=1.0, xtc_threshold=0.6).toggles()]
