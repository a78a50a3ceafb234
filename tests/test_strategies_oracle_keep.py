"""Oracle of attention against attention written out over the whole text."""
from __future__ import annotations

import pytest
import torch
from pairs import pair

from playground.contract import make
from playground.contract.assembly import Assembly
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Figure
from strategies.kv_cache.oracle_keep import OracleKeep
from support.attention_written_out import Change, written_out
from support.budget_policies import TEXT, TREE, with_policy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.kv_caches import exact_softmax
from support.wrong_variants import variants_of


def only_the_largest(size: int, groups: int) -> Change:
    def change(q, k, scores, scaling):
        weights = scores.softmax(-1).unflatten(0, (groups, -1)).sum(1)
        least = weights.sort(-1, descending=True).values[..., min(size, weights.shape[-1]) - 1, None]
        seen = (weights >= least).repeat_interleave(len(scores) // groups, 0)
        seen[:, :len(PROMPT)] = True
        return scores.masked_fill(~seen, float("-inf"))
    return change


class EveryHeadSeesTheSame(OracleKeep):
    def select_for_rows(self, layer, weights, query_positions):
        return super().select_for_rows(layer, weights.sum(0, keepdim=True), query_positions).expand_as(weights)


class TheSmallestAreSeen(OracleKeep):
    def select_for_rows(self, layer, weights, query_positions):
        return super().select_for_rows(layer, -weights.masked_fill(weights == 0, 9), query_positions)


class TheLatestAreSeen(OracleKeep):
    def select_for_rows(self, layer, weights, query_positions):
        latest = torch.arange(weights.shape[-1]).expand(weights.shape).double()
        return super().select_for_rows(layer, latest, query_positions)


@pytest.mark.oracle("oracle_keep")
@pytest.mark.parametrize("architecture, groups", [("llama", 2), ("qwen3", 2), ("gpt_neox", 4), ("gpt2", 4)])
@pytest.mark.parametrize("size", [1, 4, 11])
def test_every_row_sees_the_slots_it_attends_to_most(architecture, groups, size):
    ids, held = course(alone(make("oracle_keep", size=size)), models(architecture))
    assert ids == written_out(architecture, only_the_largest(size, groups))
    assert {len(head) for layer in held[-1] for head in layer} == {len(PROMPT) + LENGTH - 1}


@pytest.mark.refuses("oracle_keep")
@pytest.mark.parametrize("wrong", variants_of(OracleKeep, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_oracle_is_detected(wrong):
    assert any(
        course(alone(wrong(size=size)), models())[0] != written_out("llama", only_the_largest(size, 2))
        for size in (1, 4)
    )


def test_the_oracle_works_with_soft_capped_attention():
    """gemma2's scores are soft-capped, and some of its layers have a window, within which the oracle chooses."""
    with exact_softmax():
        plain = course(alone(make("oracle_keep", size=64)), models("gemma2"))
    assert plain[0] == course(Assembly(make("greedy")), models("gemma2"))[0]
    assert course(alone(make("oracle_keep", size=2)), models("gemma2"))[0] != plain[0]


@pytest.mark.parametrize("size", [1, 5])
def test_no_other_selection_retains_more_attention_than_the_oracles(size):
    weights = torch.rand(2, 3, 20, generator=torch.Generator().manual_seed(0)) ** 4
    kept = (weights * make("oracle_keep", size=size).select_for_rows(0, weights, torch.arange(3))).sum(-1)
    for seed in range(50):
        others = torch.rand(2, 3, 20, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :size]
        assert (weights.gather(-1, others).sum(-1) <= kept).all()
    assert torch.allclose(kept, weights.sort(-1).values[..., -size:].sum(-1))


@pytest.mark.strategy("oracle_keep")
def test_the_oracle_bounds_retained_attention_not_the_output_error_and_says_so():
    weights = torch.tensor([[[0.4, 0.35, 0.25]]], dtype=torch.float64)
    values = torch.tensor([10.0, 0.0, -16.0], dtype=torch.float64)  # the full output is 0
    seen = make("oracle_keep", size=1).select_for_rows(0, weights, torch.arange(1))
    assert seen.tolist() == [[[True, False, False]]]
    errors = (values - (weights * values).sum()).abs()
    assert errors[seen[0, 0]].item() > errors.min().item(), "the second token alone would write the exact output"
    text = OracleKeep.__doc__.split("\n\n")
    assert "bound" not in text[0] and "error of the output has no such bound" in " ".join(text[1].split())


def test_the_figure_shows_the_share_of_retained_attention():
    def shares_of(size: int) -> list[Figure]:
        session = prepare(pair(), [with_policy(TREE, "oracle_keep", size=size)], Prompt(TEXT), Limits(max_new_tokens=8))
        return [
            stamped.event
            for stamped in session
            if isinstance(stamped.event, Figure) and stamped.event.name == "attention kept"
        ]

    whole, narrow = shares_of(2048), shares_of(2)
    assert [figure.data["x"] for figure in whole] == list(range(1, len(whole) + 1))
    assert all(list(figure.data["series"]) == ["layer 0", "layer 1", "layer 2"] for figure in whole)
    assert all(abs(share - 1) < 1e-9 for figure in whole for share in figure.data["series"].values())
    assert all(0 < share < 1 for figure in narrow for share in figure.data["series"].values())
