"""Watermarks and their detectors, against the transformers library and against the statistics they promise."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from registry import Collapse
from runs import alone, figures, run
from tables import TableModel, distance, law
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    SynthIDTextWatermarkLogitsProcessor,
    WatermarkDetector,
    WatermarkingConfig,
    WatermarkLogitsProcessor,
)

from playground.algorithms.sampling.watermarks import (
    REMEMBERED,
    TABLE,
    TABLE_SEED,
    Detector,
    green_detector,
    tournament,
    tournament_detector,
    z_score,
)
from playground.contract import Sampler, find, make
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from support.laws import AT_ONE, EXACT

GreenList, SynthID = find("green_list"), find("synthid")
COLLAPSES = {
    "green_list": [Collapse(alone("green_list", delta=0.0), LaneConfig("greedy"))],
    "synthid": [Collapse(alone("synthid", keys=""), LaneConfig("greedy", {}, [AT_ONE]))],
}
V, KEY, KEYS, WIDTH = 40, 15485863, [654, 400, 836], 2


def texts(count: int, length: int, size: int = V, seed: int = 0) -> list[list[int]]:
    """Uniformly random texts, without any watermark."""
    return torch.randint(size, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def refused(check: Callable, *wrong) -> None:
    with pytest.raises(AssertionError):
        check(*wrong)


# --- the generators against the library's ---


def check_green_list(cls: type[Sampler]) -> None:
    for gamma, delta in ((0.25, 2.0), (0.5, 4.5)):
        library = WatermarkLogitsProcessor(V, "cpu", gamma, delta, KEY)
        ids, scores = torch.tensor(texts(12, 5)), rows(12)
        found = cls(gamma=gamma, delta=delta).apply(scores, ids.tolist())
        assert torch.allclose(found, library(ids, scores))


def check_synthid(cls: type[Sampler]) -> None:
    """Token by token, since the library's processor has a state; the second half of the text repeats the first."""
    library = SynthIDTextWatermarkLogitsProcessor(WIDTH + 1, KEYS, TABLE, TABLE_SEED, REMEMBERED, torch.device("cpu"))
    sampler, prompt, text = cls(width=WIDTH, keys=" ".join(map(str, KEYS))), [3, 1], [*texts(1, 6)[0]] * 2
    sampler.begin(len(prompt), str)
    for end, row in enumerate(rows(len(text))):
        history = [*prompt, *text[:end]]
        expected = library(torch.tensor([history]), row[None])
        assert torch.allclose(sampler.apply(row[None], [history]).softmax(-1), expected.softmax(-1)), end


class GreenByTheTokenBefore(GreenList):
    def apply(self, scores, histories):
        return super().apply(scores, [history[:-1] for history in histories])


class FavoursTheRed(GreenList):
    def apply(self, scores, histories):
        return 2 * scores - super().apply(scores, histories)


class MarksRepeatedContexts(SynthID):
    def _marked(self, row, written, keys):
        return super()._marked(row, [*range(100, 100 + len(written) - self.width), *written[-self.width:]], keys)


class CountsThePrompt(SynthID):
    def begin(self, start, piece, end_ids=frozenset()):
        super().begin(0, piece, end_ids)


class OneMatchOnly(SynthID):
    def _keys(self):
        return super()._keys()[:1]


@pytest.mark.oracle("green_list")
def test_green_tokens_are_favoured_as_in_the_library():
    check_green_list(GreenList)


@pytest.mark.refuses("green_list")
@pytest.mark.parametrize("wrong", [GreenByTheTokenBefore, FavoursTheRed])
def test_a_wrong_green_list_is_refused(wrong):
    refused(check_green_list, wrong)


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


@pytest.mark.slow
def test_averaged_over_keys_a_tournament_leaves_the_distribution_as_it_is_and_a_green_list_does_not():
    row = rows(1)
    p = row.softmax(-1)[0]
    marked = torch.stack([make("synthid", width=1, keys=f"{key} {key + 7}").apply(row, [[5]]).softmax(-1)[0]
                          for key in range(1500)]).mean(0)
    green = torch.stack([make("green_list", key=key).apply(row, [[5]]).softmax(-1)[0]
                         for key in range(1, 1501)]).mean(0)
    assert (marked - p).abs().max() < 0.03 < (green - p).abs().max()


# --- the detectors against the library's ---


def check_green_detector(build: Callable[..., Detector]) -> None:
    model, config = PreTrainedConfig(vocab_size=V, bos_token_id=-1), WatermarkingConfig(greenlist_ratio=0.25)
    for repeats in (False, True):
        library = WatermarkDetector(model, "cpu", config, ignore_repeated_ngrams=not repeats)
        for text in [*texts(5, 60), [1, 2, 3] * 20]:
            theirs = library(torch.tensor([text]), return_dict=True)
            assert build(V, 0.25, KEY, repeats=repeats).read(text).z == pytest.approx(theirs.z_score[0])


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


@pytest.mark.oracle("green_list")
def test_green_tokens_are_counted_as_in_the_librarys_detector():
    check_green_detector(green_detector)


@pytest.mark.oracle("synthid")
def test_coin_flips_are_counted_as_in_the_library():
    check_tournament_detector(tournament_detector)


@pytest.mark.refuses("green_list")
def test_detectors_with_another_key_or_share_are_refused():
    refused(check_green_detector, lambda size, gamma, key, repeats: green_detector(size, gamma, key + 1, repeats))
    refused(check_green_detector, lambda size, gamma, key, repeats: green_detector(size, 0.3, key, repeats))
    refused(check_green_detector, lambda size, gamma, key, repeats: green_detector(size, gamma, key, not repeats))


@pytest.mark.refuses("synthid")
def test_detectors_with_other_keys_or_another_width_are_refused():
    refused(check_tournament_detector, lambda width, keys: tournament_detector(width, keys[::-1][:2]))
    refused(check_tournament_detector, lambda width, keys: tournament_detector(width + 1, keys))


# --- what they promise ---

DETECTORS = {"green_list": lambda: green_detector(1000, 0.25, KEY), "synthid": lambda: tournament_detector(WIDTH, KEYS)}


@pytest.mark.slow
@pytest.mark.strategy("green_list", "synthid")
@pytest.mark.parametrize("build", DETECTORS.values(), ids=DETECTORS)
def test_without_a_watermark_the_z_score_is_standard_normal(build):
    """Of 200 texts the mean has a standard error of 0.07, the deviation one of 0.05."""
    z = torch.tensor([build().read(text).z for text in texts(200, 50, 1000)])
    assert abs(float(z.mean())) < 0.25 and abs(float(z.std()) - 1) < 0.2


MARKED = {
    "green_list": (LaneConfig("greedy", {}, [("green_list", {}), AT_ONE]), lambda: green_detector(V, 0.25, KEY)),
    "synthid": (LaneConfig("greedy", {}, [("synthid", {}), AT_ONE]),
                lambda: tournament_detector(4, make("synthid")._keys())),
}


@pytest.mark.strategy("green_list", "synthid")
@pytest.mark.parametrize("lane, build", MARKED.values(), ids=MARKED)
def test_with_a_watermark_every_text_is_found_and_without_one_none(lane, build):
    """Uniform rows; with delta 2 the expected z-score of 60 tokens is 8, with nine layers it is about 7."""
    model = {"target": TableModel([chr(33 + i) for i in range(V)], spread=0.5)}
    for seed in range(3):
        for config, found in ((lane, True), (LaneConfig("greedy", {}, [AT_ONE]), False)):
            text = run(config, model, [0, 1], 60, seed)[0].main.written
            assert (build().read(text).z > 4) == found


@pytest.mark.strategy("green_list", "synthid")
@pytest.mark.parametrize("lane, build", MARKED.values(), ids=MARKED)
def test_a_run_records_what_the_detector_sees(lane, build):
    done, events = run(lane, {"target": TableModel([chr(33 + i) for i in range(V)])}, [0, 1], 30, 3)
    seen = build().read(done.main.written)
    assert figures(events, "watermark")[-1]["series"]["z-score"] == pytest.approx(seen.z)
    shades = [data for name in ("green tokens", "won coin flips") for data in figures(events, name)]
    assert all(data["shades"] for data in shades)
    spans = [span for data in shades for span in data["spans"]]
    assert spans and {span[0]: span[3] for span in spans} == {i: v for i, v in enumerate(seen.values) if v is not None}


def test_a_text_read_piece_by_piece_is_the_text_read_at_once():
    text, detector = texts(1, 30, 5)[0], green_detector(V, 0.25, KEY)
    pieces = [detector.read(text[:end]) for end in (1, 7, 7, 30)]
    assert pieces[-1] == green_detector(V, 0.25, KEY).read(text)
    assert detector.read([4, *text]) == green_detector(V, 0.25, KEY).read([4, *text])
    assert z_score(0, 0, 0.25) == 0.0


@pytest.mark.strategy("green_list", "synthid")
def test_drafting_leaves_the_law_of_a_watermark_as_it_is():
    models = {"target": TableModel("abc", seed=1), "draft": TableModel("abc", seed=2)}
    for mark in (("green_list", {}), ("synthid", {"width": 1, "keys": "5 9"})):
        plain, drafted = (LaneConfig(decoder, {}, [*slots, mark, AT_ONE]) for decoder, slots in (
            ("greedy", []), ("speculative", [("draft_model", {"depth": 2}), ("rejection", {})])))
        assert distance(law(plain, models, [0, 1], 2), law(drafted, models, [0, 1], 2)) < EXACT


@pytest.mark.parametrize("keys", ["one two", "1.5", "-3", "9999999999", "1 " * 65])
def test_keys_that_are_no_numbers_are_refused(keys):
    with pytest.raises(Refusal, match="keys must be"):
        make("synthid", keys=keys)
