"""Truncation samplers, plain decoders and entropy adaptive decoding, against the library and worked examples."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse, lanes, title
from tables import TableModel, write
from transformers import EpsilonLogitsWarper, EtaLogitsWarper, TopHLogitsWarper, TypicalLogitsWarper

from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from support.sampled_texts import ead

GREEDY, MODEL = LaneConfig("greedy"), LaneConfig("greedy", {}, [("temperature", {"t": 1.0})])


def alone(name: str, **knobs) -> LaneConfig:
    return LaneConfig("greedy", {}, [(name, knobs)])


AT_REST = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
COLLAPSES = {
    "sample": [
        Collapse(LaneConfig("sample", AT_REST), MODEL),
        Collapse(LaneConfig("sample", {"temperature": 0.0}), GREEDY),
        Collapse(LaneConfig("sample", {"top_k": 1}), GREEDY),
        Collapse(LaneConfig("sample", {"top_p": 0.0}), GREEDY),
        Collapse(LaneConfig("sample", {"min_p": 1.0}), GREEDY),
    ],
    "temperature": [Collapse(alone("temperature", t=0.0), GREEDY), Collapse(MODEL, LaneConfig("sample", AT_REST))],
    "top_k": [Collapse(alone("top_k", k=1), GREEDY), Collapse(alone("top_k", k=0), MODEL)],
    "top_p": [Collapse(alone("top_p", p=0.0), GREEDY), Collapse(alone("top_p", p=1.0), MODEL)],
    "min_p": [Collapse(alone("min_p", m=1.0), GREEDY), Collapse(alone("min_p", m=0.0), MODEL)],
    "repetition_penalty": [Collapse(alone("repetition_penalty", penalty=1.0), GREEDY)],
    "epsilon": [Collapse(alone("epsilon", epsilon=0.0), MODEL)],
    "eta": [Collapse(alone("eta", eta=0.0), MODEL)],
    "top_n_sigma": [Collapse(alone("top_n_sigma", n=0.0), MODEL)],
    "ead": [
        Collapse(ead(threshold=8.0, start="small", dwell=0), GREEDY, on="draft"),
        Collapse(ead(threshold=-1.0, start="large", dwell=0), GREEDY),
        Collapse(ead(dwell=64, start="large"), GREEDY),
        Collapse(ead(dwell=64, start="small"), GREEDY, on="draft"),
    ]
    + [
        Collapse(ead(threshold=t, window=w, dwell=d, start=s), GREEDY, twins=True)
        for t, w, d, s in [
            (1.5, 1, 0, "large"),
            (1.5, 1, 0, "small"),
            (1.8, 3, 2, "large"),
            (6.0, 1, 0, "small"),
            (6.2, 5, 1, "large"),
        ]
    ],
}


@pytest.mark.parametrize(
    "config", lanes("greedy_identical") + [alone("top_p", p=0.0), alone("temperature", t=0.0)], ids=title
)
def test_ties_go_to_the_lower_id(config):
    undecided = TableModel("abc", rule=lambda context: torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    lane = write(
        assemble(config), {"target": undecided, "draft": undecided}, [0, 1, 2], Limits(max_new_tokens=8), Draws(0)
    )
    assert lane.text == "b" * 8


# --- truncation ---

def with_knobs(name: str, *values: float):
    """A sampler at a setting that may be beyond its slider."""
    return find(name)(*values)


def random_rows(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(25, size, generator=torch.Generator().manual_seed(seed + size)).to(dtype) * 3


def kept(name: str, value: float, rows: torch.Tensor) -> torch.Tensor:
    """Which tokens of each row are left, [n, V]."""
    return with_knobs(name, value).apply(rows, [[]] * len(rows)) > -math.inf


LIBRARY = {
    "epsilon": (EpsilonLogitsWarper, [0.0003, 0.0009, 0.05, 0.5, 0.999]),
    "eta": (EtaLogitsWarper, [0.0003, 0.002, 0.1, 0.5]),
    "top_h": (TopHLogitsWarper, [0.05, 0.4, 0.7, 0.95]),
    "typical": (TypicalLogitsWarper, [0.05, 0.2, 0.9, 0.95]),
}


@pytest.mark.oracle("epsilon", "eta", "top_h", "typical")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 3, 50, 99, 101, 1000])
@pytest.mark.parametrize("name", LIBRARY)
def test_truncated_rows_equal_the_librarys(name, size, dtype):
    theirs, values = LIBRARY[name]
    for value in values:
        for seed in range(4):
            rows = random_rows(size, seed, dtype)
            assert torch.equal(with_knobs(name, value).apply(rows, [[]] * 25), theirs(value)(None, rows)), value


HAND = torch.tensor([[0.50, 0.30, 0.15, 0.05]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    "name, value, left",
    [
        ("epsilon", 0.1, {0, 1, 2}),
        ("epsilon", 0.2, {0, 1}),
        ("epsilon", 0.9, {0}),
        ("epsilon", 0.0, {0, 1, 2, 3}),
        ("eta", 0.2, {0, 1, 2}),
        ("eta", 0.04, {0, 1, 2, 3}),
        ("eta", 0.0, {0, 1, 2, 3}),
        ("top_h", 0.4, {0}),
        ("top_h", 0.7, {0, 1}),
        ("top_h", 0.05, {0}),
        ("typical", 0.5, {0, 1}),
        ("typical", 0.2, {1}),
        ("top_n_sigma", 1.0, {0, 1}),
        ("top_n_sigma", 1.5, {0, 1, 2}),
        ("top_n_sigma", 0.0, {0, 1, 2, 3}),
        ("top_n_sigma", 0.01, {0}),
    ],
)
def test_worked_examples_of_truncation(name, value, left):
    assert set(kept(name, value, HAND)[0].nonzero().flatten().tolist()) == left


def test_etas_floor_falls_with_entropy_in_nats():
    assert math.sqrt(0.22) * math.exp(-1.1421) < 0.15 < math.sqrt(0.23) * math.exp(-1.1421)
    assert kept("eta", 0.22, HAND)[0, 2] and not kept("eta", 0.23, HAND)[0, 2]


def test_top_n_sigma_is_invariant_to_temperature():
    rows = random_rows(200, dtype=torch.float64)
    assert torch.equal(kept("top_n_sigma", 1.2, rows), kept("top_n_sigma", 1.2, rows / 3.7))
    assert not torch.equal(kept("epsilon", 0.01, rows), kept("epsilon", 0.01, rows / 3.7))


@pytest.mark.strategy("top_h")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_h_at_one_retains_exactly_the_hundred_most_probable_tokens(dtype):
    rows = torch.randn(50, 500, generator=torch.Generator().manual_seed(0), dtype=dtype) * 3
    found = kept("top_h", 1.0, rows)
    assert torch.equal(found, rows >= rows.topk(100).values[:, -1:])


CUTS = {"epsilon": 0.02, "eta": 0.05, "top_h": 0.6, "top_n_sigma": 1.0}
every_cut = pytest.mark.parametrize("name, value", CUTS.items(), ids=CUTS)


@every_cut
def test_removed_tokens_neither_return_nor_count(name, value):
    rows = random_rows(50, dtype=torch.float64)
    masked = torch.cat([rows, torch.full((25, 30), -math.inf, dtype=torch.float64)], 1)
    assert (
        torch.equal(kept(name, value, masked)[:, :50], kept(name, value, rows))
        and not kept(name, value, masked)[:, 50:].any()
    )


@every_cut
def test_truncation_is_invariant_to_token_order_and_batching(name, value):
    rows, order = random_rows(50, dtype=torch.float64), torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kept(name, value, rows[:, order]), kept(name, value, rows)[:, order])
    assert torch.equal(kept(name, value, rows), torch.cat([kept(name, value, row[None]) for row in rows]))


@every_cut
def test_the_best_token_stays_and_no_score_changes(name, value):
    for spread in (0.0, 1e-3, 30.0):
        rows = random_rows(50, dtype=torch.float64) * spread
        found = with_knobs(name, value).apply(rows, [[]] * 25)
        assert (found.gather(-1, rows.argmax(-1, keepdim=True)) > -math.inf).all()
        assert torch.equal(found[found > -math.inf], rows[found > -math.inf])


WRONG_CUTS = {
    "epsilon relative to the best token": (
        "epsilon",
        lambda rows: rows.softmax(-1) >= 0.02 * rows.softmax(-1).amax(-1, keepdim=True),
    ),
    "eta with the entropy in bits": (
        "eta",
        lambda rows: (
            rows.softmax(-1)
            >= torch.minimum(
                torch.tensor(0.05),
                0.05**0.5 * (-torch.special.entr(rows.softmax(-1)).sum(-1, keepdim=True) / math.log(2)).exp(),
            )
        ),
    ),
    "eta without its square root": (
        "eta",
        lambda rows: (
            rows.softmax(-1)
            >= torch.minimum(
                torch.tensor(0.05), 0.05 * (-torch.special.entr(rows.softmax(-1)).sum(-1, keepdim=True)).exp()
            )
        ),
    ),
    "top-h up to and with the token that crosses the share": ("top_h", lambda rows: crossing_kept(rows, 0.6)),
    "sigma from the mean up": (
        "top_n_sigma",
        lambda rows: rows >= rows.mean(-1, keepdim=True) + rows.std(-1, keepdim=True),
    ),
    "sigma of the probabilities": (
        "top_n_sigma",
        lambda rows: (p := rows.softmax(-1)) >= p.amax(-1, keepdim=True) - p.std(-1, keepdim=True),
    ),
}


def crossing_kept(rows: torch.Tensor, h: float) -> torch.Tensor:
    ordered, order = rows.sort(descending=True)
    terms = torch.special.entr(ordered.softmax(-1))
    return torch.zeros_like(rows, dtype=torch.bool).scatter(
        -1, order, terms.cumsum(-1) - terms <= h * terms.sum(-1, keepdim=True)
    )


@pytest.mark.parametrize("name, wrong", WRONG_CUTS.values(), ids=WRONG_CUTS)
def test_a_wrong_truncation_is_detected(name, wrong):
    rows = random_rows(50, dtype=torch.float64) / 2
    assert not torch.equal(kept(name, CUTS[name], rows), wrong(rows))
