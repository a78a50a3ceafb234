"""Watermark: green list against the library and the statistics that it promises."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from registry import Collapse
from runs import alone
from transformers import PreTrainedConfig, WatermarkDetector, WatermarkingConfig, WatermarkLogitsProcessor

from playground.algorithms.sampling.watermarks import Detector, green_detector
from playground.contract import Sampler, find
from playground.contract.lane_config import LaneConfig
from support.watermarked_texts import KEY, V, rows, texts
from support.wrong_variants import refused

GreenList = find("green_list")
COLLAPSES = {"green_list": [Collapse(alone("green_list", delta=0.0), LaneConfig("greedy"))]}


# --- the generators against the library's ---

def check_green_list(cls: type[Sampler]) -> None:
    for gamma, delta in ((0.25, 2.0), (0.5, 4.5)):
        library = WatermarkLogitsProcessor(V, "cpu", gamma, delta, KEY)
        ids, scores = torch.tensor(texts(12, 5)), rows(12)
        found = cls(gamma=gamma, delta=delta).apply(scores, ids.tolist())
        assert torch.allclose(found, library(ids, scores))


class GreenByTheTokenBefore(GreenList):
    def apply(self, scores, histories):
        return super().apply(scores, [history[:-1] for history in histories])


class FavoursTheRed(GreenList):
    def apply(self, scores, histories):
        return 2 * scores - super().apply(scores, histories)


@pytest.mark.oracle("green_list")
def test_green_tokens_are_favoured_as_in_the_library():
    check_green_list(GreenList)


@pytest.mark.refuses("green_list")
@pytest.mark.parametrize("wrong", [GreenByTheTokenBefore, FavoursTheRed])
def test_a_wrong_green_list_is_refused(wrong):
    refused(check_green_list, wrong)


# --- the detectors against the library's ---

def check_green_detector(build: Callable[..., Detector]) -> None:
    model, config = PreTrainedConfig(vocab_size=V, bos_token_id=-1), WatermarkingConfig(greenlist_ratio=0.25)
    for repeats in (False, True):
        library = WatermarkDetector(model, "cpu", config, ignore_repeated_ngrams=not repeats)
        for text in [*texts(5, 60), [1, 2, 3] * 20]:
            theirs = library(torch.tensor([text]), return_dict=True)
            assert build(V, 0.25, KEY, repeats=repeats).read(text).z == pytest.approx(theirs.z_score[0])


@pytest.mark.oracle("green_list")
def test_green_tokens_are_counted_as_in_the_librarys_detector():
    check_green_detector(green_detector)


@pytest.mark.refuses("green_list")
def test_detectors_with_another_key_or_share_are_refused():
    refused(check_green_detector, lambda size, gamma, key, repeats: green_detector(size, gamma, key + 1, repeats))
    refused(check_green_detector, lambda size, gamma, key, repeats: green_detector(size, 0.3, key, repeats))
    refused(check_green_detector, lambda size, gamma, key, repeats: green_detector(size, gamma, key, not repeats))
