"""Watermark: SynthID against the library and the statistics that it promises."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from registry import Collapse
from runs import alone
from transformers import SynthIDTextWatermarkLogitsProcessor

from playground.algorithms.sampling.watermarks import (
    REMEMBERED,
    TABLE,
    TABLE_SEED,
    Detector,
    tournament,
    tournament_detector,
)
from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from support.laws import AT_ONE
from support.watermarked_texts import KEYS, WIDTH, rows, texts
from support.wrong_variants import refused

SynthID = find("synthid")
COLLAPSES = {"synthid": [Collapse(alone("synthid", keys=""), LaneConfig("greedy", {}, [AT_ONE]))]}


# --- the generators against the library's ---

def check_synthid(cls: type[Sampler]) -> None:
    """Token by token, since the library's processor has a state; the second half of the text repeats the first."""
    library = SynthIDTextWatermarkLogitsProcessor(WIDTH + 1, KEYS, TABLE, TABLE_SEED, REMEMBERED, torch.device("cpu"))
    sampler, prompt, text = cls(width=WIDTH, keys=" ".join(map(str, KEYS))), [3, 1], [*texts(1, 6)[0]] * 2
    sampler.begin(len(prompt), str)
    for end, row in enumerate(rows(len(text))):
        history = [*prompt, *text[:end]]
        expected = library(torch.tensor([history]), row[None])
        assert torch.allclose(sampler.apply(row[None], [history]).softmax(-1), expected.softmax(-1)), end


class MarksRepeatedContexts(SynthID):
    def _marked(self, row, written, keys):
        return super()._marked(row, [*range(100, 100 + len(written) - self.width), *written[-self.width:]], keys)


class CountsThePrompt(SynthID):
    def begin(self, start, piece, end_ids=frozenset()):
        super().begin(0, piece, end_ids)


class OneMatchOnly(SynthID):
    def _keys(self):
        return super()._keys()[:1]


@pytest.mark.oracle("synthid")
def test_a_tournament_gives_the_librarys_law_token_by_token():
    check_synthid(SynthID)


@pytest.mark.refuses("synthid")
@pytest.mark.parametrize("wrong", [MarksRepeatedContexts, CountsThePrompt, OneMatchOnly])
def test_a_wrong_tournament_is_refused(wrong):
    refused(check_synthid, wrong)


@pytest.mark.oracle("synthid")
def test_a_tournament_can_be_played():
    """Two layers: of four tokens drawn from p, those with the larger flip survive; summed over all draws."""
    p, g = [0.5, 0.2, 0.2, 0.1], [[1, 0, 1, 0], [0, 0, 1, 1]]

    def winners(law: list[float], flips: list[int]) -> list[float]:
        won = [0.0] * len(law)
        for a, x in enumerate(law):
            for b, y in enumerate(law):
                ahead = [a] if flips[a] > flips[b] else [b] if flips[b] > flips[a] else [a, b]
                for winner in ahead:
                    won[winner] += x * y / len(ahead)
        return won

    found = tournament(torch.tensor(p, dtype=torch.float64), torch.tensor(g))
    assert found.tolist() == pytest.approx(winners(winners(p, g[0]), g[1]))


# --- the detectors against the library's ---

def check_tournament_detector(build: Callable[..., Detector]) -> None:
    library = SynthIDTextWatermarkLogitsProcessor(WIDTH + 1, KEYS, TABLE, TABLE_SEED, REMEMBERED, torch.device("cpu"))
    for text in [*texts(5, 40, 6), [1, 2, 3] * 9]:
        ids = torch.tensor([text])
        flips, new = library.compute_g_values(ids)[0], library.compute_context_repetition_mask(ids)[0]
        seen = build(WIDTH, KEYS).read(text)
        expected = [float(row.double().mean()) if fresh else None for row, fresh in zip(flips, new)]
        assert seen.values == [None] * WIDTH + expected
        total, count = float(flips[new].sum()), int(new.sum()) * len(KEYS)
        assert seen.z == pytest.approx((total - count / 2) / math.sqrt(count / 4))


@pytest.mark.oracle("synthid")
def test_coin_flips_are_counted_as_in_the_library():
    check_tournament_detector(tournament_detector)


@pytest.mark.refuses("synthid")
def test_detectors_with_other_keys_or_another_width_are_refused():
    refused(check_tournament_detector, lambda width, keys: tournament_detector(width, keys[::-1][:2]))
    refused(check_tournament_detector, lambda width, keys: tournament_detector(width + 1, keys))


# --- what they promise ---

@pytest.mark.parametrize("keys", ["one two", "1.5", "-3", "9999999999", "1 " * 65])
def test_keys_that_are_no_numbers_are_refused(keys):
    with pytest.raises(Refusal, match="keys must be"):
        make("synthid", keys=keys)
