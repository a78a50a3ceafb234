"""Cache policies that act on what a row attends to: against attention written out over the whole text."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from pairs import network, pair
from transformers import AttentionInterface

from playground.contract import make
from playground.contract.lane_config import Assembly
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Figure
from strategies.kv_cache.oracle_keep import OracleKeep
from strategies.kv_cache.sink_window import SinkWindow
from support.budget_policies import ROW_WISE, TEXT, TREE, with_policy
from support.eviction import LENGTH, PROMPT, Wrong, alone, course, models
from support.kv_caches import exact_softmax
from support.wrong_variants import variants_of

# --- attention written out by hand over the whole text, for policies that act on rows ---

Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""change(queries [heads, n, d], keys [heads, n, d], causal scores [heads, n, n], scaling) -> scores"""


@torch.inference_mode()
def written_out(architecture: str, change: Change, length: int = LENGTH) -> list[int]:
    """Greedy decoding that reads the whole text again for each token, with the scores of attention changed."""
    def attention(module, query, key, value, mask, scaling, **others):
        q, (k, v) = query[0], (part[0].repeat_interleave(query.shape[1] // part.shape[1], 0) for part in (key, value))
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(
            ~torch.ones(q.shape[1], q.shape[1]).tril().bool(), float("-inf")
        )
        return (change(q, k, scores, scaling).softmax(-1) @ v).transpose(0, 1)[None], None

    AttentionInterface.register("written_out", attention)
    by_hand, ids = network(architecture), list(PROMPT)
    by_hand.set_attn_implementation("written_out")
    for _ in range(length):
        ids.append(int(by_hand(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT):]


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


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("name, knobs", ROW_WISE.items(), ids=ROW_WISE)
def test_per_row_selection_supports_draft_trees(name, knobs, architecture):
    plain = course(alone(make(name, **knobs)), models(architecture))[0]
    for drafter in (make("draft_model", width=2, depth=3), make("prompt_lookup"), Wrong()):
        decoder = make("speculative", verifier="greedy_match")
        decoder.drafter = drafter
        assembly = Assembly(decoder, cache_policy=make(name, **knobs))
        assert course(assembly, models(architecture))[0] == plain
        assert "greedy_identical" in assembly.guarantee()
    assert plain != course(Assembly(make("greedy")), models(architecture))[0]


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


# --- positions in the cache ---

def numbered_by_the_cache(sinks: int, window: int, first: int = len(PROMPT)) -> Change:
    """Unrotate every query and key, and rotate them again, row by row, by their index among what the row sees.

    Rows before the first one see everything.
    """
    def change(q, k, scores, scaling):
        changed = scores.clone()
        for row in range(first, q.shape[1]):
            seen = [p for p in range(row + 1) if p < sinks or row - p < window]
            places = torch.arange(len(seen))
            query, keys = (
                rotated(q[:, row : row + 1], torch.tensor([len(seen) - 1 - row])),
                rotated(k[:, seen], places - torch.tensor(seen)),
            )
            changed[:, row] = float("-inf")
            changed[:, row, seen] = (query * keys).sum(-1) * scaling
        return changed
    return change


@cache
def theta() -> float:
    return network("llama").config.rope_parameters["rope_theta"]


def rotated(rows: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Rows [heads, n, d] rotated by so many positions [n]; the components of a pair are half a row apart."""
    half = rows.shape[-1] // 2
    angles = by[:, None] * theta() ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(rows[..., :half], rows[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


class TurnedTheOtherWay(SinkWindow):
    def gap_width(self, query_positions):
        return -super().gap_width(query_positions)


class OneTooFew(SinkWindow):
    def gap_width(self, query_positions):
        return (super().gap_width(query_positions) - 1).clamp(min=0)


class EverythingIsFar(SinkWindow):
    def before_gap(self, key_positions):
        return key_positions >= 0


@pytest.mark.oracle("sink_window")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("sinks, window", [(2, 5), (4, 1), (0, 6), (4, 40)])
def test_renumbered_positions_are_indices_in_the_cache(architecture, sinks, window):
    ours = course(alone(make("sink_window", sinks=sinks, window=window, positions="renumbered")), models(architecture))
    true = course(alone(make("sink_window", sinks=sinks, window=window)), models(architecture))
    assert ours[0] == written_out(architecture, numbered_by_the_cache(sinks, window))
    assert ours[1] == true[1]
    assert (ours[0] == true[0]) == (sinks == 0 or sinks + window > len(PROMPT) + LENGTH)


@pytest.mark.refuses("sink_window")
@pytest.mark.parametrize("wrong", [TurnedTheOtherWay, OneTooFew, EverythingIsFar], ids=lambda cls: cls.__name__)
def test_a_wrong_renumbering_is_detected(wrong):
    assert course(alone(wrong(sinks=2, window=5, positions="renumbered")), models())[0] != written_out(
        "llama", numbered_by_the_cache(2, 5)
    )


# --- a prompt that is read within the window ---

def within_the_window(sinks: int, window: int) -> Change:
    """Every row, those of the prompt included, sees the sinks and the last tokens."""
    def change(q, k, scores, scaling):
        place = torch.arange(q.shape[1])
        return scores.masked_fill((place >= sinks) & (place[:, None] - place >= window), float("-inf"))
    return change


CHUNKS = [(2, 5, 3), (0, 6, 1), (4, 1, 64)]  # sinks, window, chunk


def check_windowed_prefill(policy: type[SinkWindow]) -> None:
    for sinks, window, chunk in CHUNKS:
        knobs = {"sinks": sinks, "window": window, "prefill": "windowed", "chunk": chunk}
        assert course(alone(policy(**knobs)), models())[0] == written_out("llama", within_the_window(sinks, window))
        assert course(alone(policy(**knobs, positions="renumbered")), models())[0] == written_out(
            "llama", numbered_by_the_cache(sinks, window, first=0)
        )


class ForgetsBeforeEveryChunk(SinkWindow):
    """The first rows of a chunk see less: what the last row of the chunk does not see is gone."""

    def visible(self, query_positions, key_positions):
        last = query_positions // self.chunk * self.chunk + self.chunk - 1 if self.restricts_prompt else query_positions
        return (key_positions < self.sinks) | (last - key_positions < self.window)


class SeesTheWholePrompt(SinkWindow):
    restricts_prompt = False


@pytest.mark.slow
@pytest.mark.oracle("sink_window")
def test_a_windowed_prompt_is_read_as_if_every_row_had_the_mask():
    check_windowed_prefill(SinkWindow)


@pytest.mark.refuses("sink_window")
@pytest.mark.parametrize("wrong", [ForgetsBeforeEveryChunk, SeesTheWholePrompt], ids=lambda cls: cls.__name__)
def test_a_wrong_windowed_prefill_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_windowed_prefill(wrong)


@pytest.mark.strategy("sink_window")
def test_a_windowed_prompt_never_holds_more_than_the_budget_and_a_chunk(monkeypatch):
    policy, most = make("sink_window", sinks=2, window=5, prefill="windowed", chunk=4), []

    def visible(query_positions, key_positions):
        most.append(len(key_positions))
        return SinkWindow.visible(policy, query_positions, key_positions)

    monkeypatch.setattr(policy, "visible", visible)
    course(alone(policy), models())
    assert len(PROMPT) > 2 + 5 + 4 >= max(most)


def test_no_renumbered_distance_exceeds_the_cache_length():
    policy = make("sink_window", sinks=3, window=7, positions="renumbered")
    for query in range(200):
        at = torch.tensor([query])
        seen = policy.visible(at[:, None], torch.arange(query + 1))[0].nonzero().flatten()
        distances = query - seen - policy.gap_width(at) * policy.before_gap(seen)
        assert distances.sort(descending=True).values.tolist() == list(range(min(query + 1, 10)))[::-1]


def test_rotating_queries_back_moves_them_to_an_earlier_position():
    model = pair("llama").target
    rows = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    back = torch.tensor([0, 1, 7, 30, 100])
    # the model's table of angles is in float32
    assert torch.allclose(model.rotate_back(rows, back), rotated(rows, -back), atol=1e-5)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_positions_that_cannot_be_renumbered_are_refused_in_one_sentence(architecture):
    with pytest.raises(Refusal, match="switch renumbering off") as refusal:
        course(alone(make("sink_window", positions="renumbered")), models(architecture))
    assert str(refusal.value).count(".") == 1
