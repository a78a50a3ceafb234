"""Watermark: Gumbel, against its definition and the statistics that it promises."""
from __future__ import annotations

import math
import struct
from collections import Counter

import pytest
import torch
from registry import Collapse
from runs import alone, figures, run
from tables import TableModel, distance, law

from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from strategies.sampling.gumbel_watermark import Evidence, Keys, murmur3
from support.laws import AT_ONE, EXACT
from support.watermarked_texts import V, rows, texts
from support.wrong_variants import refused

Gumbel = find("gumbel_watermark")
KEY, OTHER = "0123456789abcdef", "feed"
COLLAPSES = {
    "gumbel_watermark": [
        Collapse(alone("gumbel_watermark", key=""), LaneConfig("greedy", {}, [AT_ONE])),
        Collapse(alone("gumbel_watermark", max_probability=0.0), LaneConfig("greedy", {}, [AT_ONE])),
    ],
}


# --- the hash ---

def hash_of_bytes(data: bytes) -> int:
    """MurmurHash3 of whole words, as its author describes it, with products that are cut to 32 bits."""
    h = 0
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 % 2**32
        k = k // 2**17 + k % 2**17 * 2**15
        h ^= k * 0x1B873593 % 2**32
        h = h // 2**19 + h % 2**19 * 2**13
        h = (h * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h // 2**shift) * factor % 2**32
    return h


@pytest.mark.parametrize("words, expected", [
    ((), 0), ((0,), 0x2362F9DE), ((0xFFFFFFFF,), 0x76293B50), ((0x87654321,), 0xF55B516B),
])
def test_the_hash_has_the_published_values(words, expected):
    assert murmur3(*words) == expected == hash_of_bytes(struct.pack(f"<{len(words)}I", *words))


def test_the_hash_of_a_tensor_is_that_of_each_number():
    tokens = torch.tensor([0, 1, 5, 151_935, 2**31, 2**32 - 1])
    expected = [hash_of_bytes(struct.pack("<3I", 7, 2**32 - 2, token)) for token in tokens.tolist()]
    assert murmur3(7, 2**32 - 2, tokens).tolist() == expected


# --- which token is chosen ---

def number(key: int, context: list[int], token: int) -> float:
    after = hash_of_bytes(struct.pack(f"<{len(context)}I", *context))
    return (hash_of_bytes(struct.pack("<QII", key, after, token)) + 0.5) / 2**32


def check_gumbel(cls: type[Sampler]) -> None:
    """Token by token: the largest u to the power 1 / p among tokens that are left; the second half of the text repeats
    the first, where a context of three tokens is new up to the third of its tokens.
    """
    prompt, half = [3, 1], texts(1, 6)[0]
    sampler, history = cls(key=KEY, width=3), list(prompt)
    sampler.begin(len(prompt), str)
    for place, (row, token) in enumerate(zip(rows(12), half * 2)):
        row = row.masked_fill(rows(1, seed=place)[0] > 1, -math.inf)
        p = row.softmax(-1).tolist()
        powers = [number(int(KEY, 16), history[-3:], v) ** (1 / p[v]) if p[v] else -1.0 for v in range(V)]
        found = sampler.apply(row[None], [history])[0]
        if place < 9:
            assert found.isfinite().nonzero().tolist() == [[powers.index(max(powers))]], place
        else:
            assert torch.equal(found, row), place
        history.append(token)


class PowerOfP(Gumbel):
    """u and p in each other's place."""

    def _marked(self, row, history):
        u = (self.keys.hash(history[-self.width:], torch.arange(len(row))).double() + 0.5) / 2**32
        chosen = (row.softmax(-1).log() / u).argmax()
        return torch.full_like(row, -math.inf).scatter(-1, chosen[None], row[chosen][None])


class ByTokenAlone(Gumbel):
    def _marked(self, row, history):
        return super()._marked(row, [0] * len(history)) if len(history) < 11 else row


class MarksRepeats(Gumbel):
    def _contexts(self, history):
        return iter(())


class RevivesRemoved(Gumbel):
    """Chooses by the scores of all tokens."""

    def _marked(self, row, history):
        return super()._marked(row.clamp(min=-5), history)


@pytest.mark.oracle("gumbel_watermark")
def test_the_chosen_token_is_that_of_the_definition():
    check_gumbel(Gumbel)


@pytest.mark.refuses("gumbel_watermark")
@pytest.mark.parametrize("wrong", [PowerOfP, ByTokenAlone, MarksRepeats, RevivesRemoved])
def test_a_wrong_gumbel_watermark_is_refused(wrong):
    refused(check_gumbel, wrong)


def test_over_random_keys_a_token_has_the_probability_of_the_model():
    """Chi-square with four degrees of freedom over 4,000 keys: 23.5 is exceeded once in 10,000."""
    p = [0.5, 0.25, 0.15, 0.07, 0.03]
    row = torch.tensor([p], dtype=torch.float64).log()
    drawn = Counter(
        int(make("gumbel_watermark", key=f"{key:x}").apply(row, [[4, 2]]).argmax()) for key in range(4000)
    )
    assert sum((drawn[v] - 4000 * p[v]) ** 2 / (4000 * p[v]) for v in range(5)) < 23.5


def test_with_two_keys_a_coin_of_both_decides_who_marks():
    keys, contexts = Keys(1, 2, 0.3), [[i, i + 1] for i in range(2000)]
    by_the_second = [keys.hash(c, 7) == Keys(2, None, 0.5).hash(c, 7) for c in contexts]
    assert all(second or keys.hash(c, 7) == Keys(1, None, 0.5).hash(c, 7) for second, c in zip(by_the_second, contexts))
    assert abs(sum(by_the_second) / 2000 - 0.7) < 0.05


@pytest.mark.parametrize("key", ["xyz", "0" * 17, "-1", "1 2"])
def test_a_key_that_is_no_hexadecimal_number_is_refused(key):
    for name in ("key", "second_key"):
        with pytest.raises(Refusal, match="hexadecimal"):
            make("gumbel_watermark", **{name: key})


# --- the detector ---

def tail(count: int, total: float) -> float:
    """The chance that a sum of `count` exponential variables exceeds a total, by the Poisson process."""
    return sum(math.exp(-total) * total**k / math.factorial(k) for k in range(count))


def test_the_p_value_is_the_tail_of_a_gamma_distribution():
    for count, total in ((1, 0.0), (1, 3.0), (5, 12.0), (40, 45.0)):
        found = Evidence(Keys(1, None, 0.5), 4, count, total).log10_p_value
        assert found == pytest.approx(math.log10(tail(count, total)), abs=1e-9)
    assert Evidence(Keys(1, None, 0.5), 4, 300, 2000.0).log10_p_value < -300


def test_without_the_mark_p_values_are_uniform():
    """The largest distance of 300 p-values from a uniform law exceeds 0.12 once in 3,000."""
    found = []
    for text in texts(300, 40, 1000):
        evidence = Evidence(Keys(77, None, 0.5), 4)
        evidence.read(text)
        found.append(10**evidence.log10_p_value)
    assert max(abs(p - (i + 0.5) / 300) for i, p in enumerate(sorted(found))) < 0.12


def test_a_repeated_text_counts_once():
    once, often = Evidence(Keys(5, None, 0.5), 3), Evidence(Keys(5, None, 0.5), 3)
    text = texts(1, 12)[0]
    once.read(text + text[:3])
    often.read(text * 6)
    assert (once.count, once.total) == (often.count, often.total) and once.count == 12


def test_a_text_read_piece_by_piece_is_the_text_read_at_once():
    text, pieces, whole = texts(1, 30, 5)[0], Evidence(Keys(9, 4, 0.5), 2), Evidence(Keys(9, 4, 0.5), 2)
    for end in (1, 7, 20, 30):
        pieces.read(text[:end])
    whole.read([3, 3])
    whole.read(text)
    assert pieces == whole


LANE = LaneConfig("greedy", {}, [AT_ONE, ("gumbel_watermark", {"key": KEY})])
FLAT = {"target": TableModel([chr(33 + i) for i in range(V)], spread=0.5)}


def test_a_marked_text_is_found_by_its_key_alone_and_has_no_seed():
    marked, events = run(LANE, FLAT, [0, 1], 60, 1)
    again, _ = run(LANE, FLAT, [0, 1], 60, 2)
    plain, _ = run(LaneConfig("greedy", {}, [AT_ONE]), FLAT, [0, 1], 60, 1)
    scores = []
    for key, text in ((KEY, marked), (OTHER, marked), (KEY, plain)):
        evidence = Evidence(Keys(int(key, 16), None, 0.5), 4)
        evidence.read(text.main.written)
        scores.append(evidence.log10_p_value)
    assert marked.main.written == again.main.written
    assert scores[0] < -9 and min(scores[1:]) > -4
    shown = figures(events, "chance of such a text without the mark")[-1]["series"]["log10 of the p-value"]
    assert shown == pytest.approx(scores[0])


def test_a_certain_text_holds_no_mark():
    model = TableModel("abcd", rule=lambda context: torch.tensor([0.0, 0, 0, 0]).scatter(0, torch.tensor(
        [(context[-1] + 1 + len(context) % 3) % 4]), 60.0))
    written = run(LANE, {"target": model}, [0, 1], 60)[0].main.written
    evidence = Evidence(Keys(int(KEY, 16), None, 0.5), 4)
    evidence.read(written)
    assert evidence.log10_p_value > -3


def test_drafting_leaves_the_law_of_a_watermark_as_it_is():
    models, mark = {"target": TableModel("abc", seed=1), "draft": TableModel("abc", seed=2)}, ("gumbel_watermark", {})
    plain, drafted = (LaneConfig(decoder, {}, [*slots, mark, AT_ONE]) for decoder, slots in (
        ("greedy", []), ("speculative", [("draft_model", {"depth": 2}), ("rejection", {})])))
    assert distance(law(plain, models, [0, 1], 2), law(drafted, models, [0, 1], 2)) < EXACT
