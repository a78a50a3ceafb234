"""TCCF: two stages with blocks of different length on one model, and the request between them."""
from __future__ import annotations

import pytest
import torch

from playground.contract import make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.runner import Runner
from playground.errors import Refusal
from playground.events import Commit
from support.canvases import MASK, PROMPT, canvas, computed, course, denoiser, fills, run

LENGTH = 24
REQUEST = "check"
STAGES = dict(request=REQUEST, share=0.5, stop="")


def model(shifted: bool = True):
    return denoiser(shifted, block_length=4)


def request_ids() -> list[int]:
    return model().tokens.encode_continuation(REQUEST)


def written(events) -> list[int]:
    return [token for _, token in sorted((at, token) for at, token, _ in course(events))]


@torch.inference_mode()
def continued(ids: list[int], count: int, shifted: bool) -> list[int]:
    """Greedy decoding by the library's own causal forward; an unshifted model is asked with a mask at the end."""
    network, ids = model(shifted).network, list(ids)
    for _ in range(count):
        logits = network(input_ids=torch.tensor([[*ids, *[MASK] * (not shifted)]]), use_cache=False).logits[0, -1]
        logits[MASK] = float("-inf")
        ids.append(int(logits.argmax()))
    return ids


@pytest.mark.oracle("tccf")
@pytest.mark.parametrize("shifted", [False, True])
def test_blocks_of_one_position_in_both_stages_are_one_autoregressive_run_with_the_request_inserted(shifted):
    first = (LENGTH - len(request_ids())) // 2
    ids = [*continued(PROMPT, first, shifted), *request_ids()]
    ids = continued(ids, LENGTH - first - len(request_ids()), shifted)
    events = run(model(shifted), "tccf", coarse=1, fine=1, length=LENGTH, **STAGES)
    assert written(events) == ids[len(PROMPT):]


@pytest.mark.refuses("tccf")
def test_states_of_the_first_stage_would_be_wrong_for_the_second(monkeypatch):
    from playground.algorithms.diffusion.finished_blocks import FinishedBlocks
    from strategies.diffusion import tccf

    right = run(model(), "tccf", coarse=4, fine=1, length=LENGTH, **STAGES)
    kept = []

    def reused(lm):
        kept.append(kept[0] if kept else FinishedBlocks(lm))
        return kept[-1]

    monkeypatch.setattr(tccf, "exact_reader", reused)
    wrong = run(model(), "tccf", coarse=4, fine=1, length=LENGTH, **STAGES)
    assert fills(wrong)[0] == fills(right)[0]
    assert max(abs(a[2] - b[2]) for a, b in zip(course(right), course(wrong))) > 1e-5


def test_stage_two_continues_the_text_of_stage_one_and_the_request_from_left_to_right():
    events = run(model(), "tccf", coarse=4, fine=1, length=LENGTH, **STAGES)
    first = (LENGTH - len(request_ids())) // 2
    text = written(events)
    assert text[first:first + len(request_ids())] == request_ids()
    ids = [*PROMPT, *text[:first], *request_ids()]
    assert [*PROMPT, *text] == continued(ids, LENGTH - len(ids) + len(PROMPT), True)


def test_stage_two_computes_everything_once_more():
    counts = computed(run(model(), "tccf", coarse=4, fine=1, length=LENGTH, **STAGES))
    first = (LENGTH - len(request_ids())) // 2
    assert len(PROMPT) + first + len(request_ids()) + 1 in counts


def test_the_stop_text_ends_stage_one_in_the_middle_of_a_block():
    whole = run(model(), "tccf", coarse=4, fine=1, length=LENGTH, **STAGES)
    second = model().tokens.piece(written(whole)[1])
    events = run(model(), "tccf", coarse=4, fine=1, length=LENGTH, **STAGES | dict(stop=second))
    assert written(events)[:2] == written(whole)[:2] and written(events)[2:2 + len(request_ids())] == request_ids()


def test_an_end_token_ends_stage_one_and_is_dropped():
    whole = written(run(model(), "tccf", coarse=4, fine=1, length=LENGTH, **STAGES))
    ending = model()
    ending.end_ids = frozenset([whole[2]])
    text = written(run(ending, "tccf", coarse=4, fine=1, length=LENGTH, **STAGES))
    at = whole.index(whole[2])
    assert text[:at] == whole[:at] and text[at:at + len(request_ids())] == request_ids()


def test_the_request_is_committed_as_fixed_tokens_without_probabilities():
    events = run(model(), "tccf", coarse=4, fine=1, length=LENGTH, **STAGES)
    origins = [origin for event in events if isinstance(event, Commit) for origin in event.origins]
    assert origins.count("forced") == len(request_ids()) and origins.count("sampled") == LENGTH - len(request_ids())


def test_rule_threshold_is_rule_bounded_with_equal_bounds():
    bounded = run(model(), "tccf", length=LENGTH, rule="bounded", low=0.1, high=0.1, **STAGES)
    fixed = run(model(), "tccf", length=LENGTH, rule="threshold", low=0.0, high=0.1, **STAGES)
    assert course(bounded) == course(fixed)


def test_it_runs_on_a_model_that_sees_the_whole_canvas():
    assert len(course(run(denoiser(), "tccf", length=LENGTH, **STAGES))) == LENGTH


def test_a_canvas_without_room_for_the_request_is_refused():
    assembly = assemble(LaneConfig("tccf", STAGES))
    runner = Runner(canvas(model(), assembly, length=len(request_ids())), assembly)
    with pytest.raises(Refusal, match="allow more tokens, or shorten the request"):
        list(make("tccf", **STAGES).decode(runner.lane))
