"""Heads in the format of vLLM's `speculators` compute what that library computes, whose logits are stored
(tests/support/speculators_heads.py).
"""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from playground.algorithms.draft_heads.head_layers import HeadCache, NewRows, WholeTexts
from playground.algorithms.draft_heads.mtp_head import MtpBlock, MtpHead
from playground.contract import find
from support.speculators_heads import LAYERS, MASK, STEPS, TOKENS, hidden_states
from support.stored_heads import NEAR, REFERENCE, StoredHead, block_outputs, distance

EAGLE_3, DFLASH = ([name for name in REFERENCE if name.split(",")[0] == kind] for kind in ("eagle3", "dflash"))


def eagle_3_steps(head: StoredHead) -> list[Tensor]:
    """Logits after the target's states, and after the head's own output, as it drafts a chain."""
    network = head.network
    following = network.embedded(TOKENS[1:], head.target_embed)
    features = network.features(hidden_states(len(LAYERS)))
    first = network(following, features, WholeTexts(len(following)))
    second = [_after(network, following[: i + 2], features[: i + 1], first[i : i + 1]) for i in range(len(first) - 1)]
    return [network.read_out(rows, None) for rows in (first, torch.cat(second))]


def _after(network, embeddings: Tensor, features: Tensor, output: Tensor) -> Tensor:
    """The output that follows `output`, after a text in the head's cache."""
    cache, count = HeadCache(), len(features)
    network(embeddings[:count], features, NewRows(cache, torch.arange(count)))
    cache.commit()
    return network(embeddings[count:], output, NewRows(cache, torch.tensor([count])))


@torch.no_grad()
@pytest.mark.oracle("eagle_3")
@pytest.mark.parametrize("name", EAGLE_3)
def test_an_eagle_3_head_has_the_logits_of_its_own_library(name, tmp_path):
    head = StoredHead(name, tmp_path)
    assert head.strategy == "eagle_3" and distance(eagle_3_steps(head), head.logits) < NEAR


@torch.no_grad()
@pytest.mark.refuses("eagle_3")
@pytest.mark.parametrize("name, flag", [
    ("normed residual", "norm_before_residual"), ("normed output", "norm_output"),
])  # fmt: skip
def test_a_flag_that_is_not_read_would_be_noticed(name, flag, tmp_path):
    head = StoredHead(f"eagle3, {name}", tmp_path, **{flag: False})
    assert distance(eagle_3_steps(head), head.logits) > 100 * NEAR


@torch.no_grad()
@pytest.mark.refuses("eagle_3")
def test_a_second_layer_that_is_left_out_would_be_noticed(tmp_path):
    head = StoredHead("eagle3, two layers", tmp_path)
    head.weights = {name: part for name, part in head.weights.items() if not name.startswith("layers.1.")}
    assert distance(eagle_3_steps(head), head.logits) > 100 * NEAR


@torch.no_grad()
@pytest.mark.refuses("eagle_3")
def test_the_targets_embeddings_in_place_of_its_own_would_be_noticed(tmp_path):
    head = StoredHead("eagle3, own embeddings", tmp_path)
    head.weights = {name: part for name, part in head.weights.items() if name != "embed_tokens.weight"}
    assert distance(eagle_3_steps(head), head.logits) > 100 * NEAR


def mtp_steps(head: StoredHead, ahead: int = 1) -> list[Tensor]:
    """Logits of each step over the text; `ahead`: the step from a state to the token that is read with it."""
    block = MtpHead(MtpBlock.of(head.weights), STEPS, head.embed, head.read_out)
    rows, cache, count = hidden_states(1), block.new_cache(), len(TOKENS) - STEPS - 1
    found = []
    for step in range(STEPS):
        rows = block.states(step, rows[:count], TOKENS[step + ahead : step + ahead + count], 0, cache)
        found.append(head.read_out(rows))
    return found


@torch.no_grad()
@pytest.mark.oracle("mtp")
def test_an_mtp_layer_has_the_logits_of_its_own_library(tmp_path):
    head = StoredHead("mtp", tmp_path)
    assert head.strategy == "mtp" and int(head.weights["steps"]) == STEPS
    assert distance(mtp_steps(head), head.logits) < NEAR


@torch.no_grad()
@pytest.mark.refuses("mtp")
def test_an_mtp_layer_that_reads_the_token_of_the_state_would_be_noticed(tmp_path):
    head = StoredHead("mtp", tmp_path)
    assert distance(mtp_steps(head, ahead=0), head.logits) > 100 * NEAR


def block_logits(head: StoredHead, **read: int) -> list[Tensor]:
    """Logits of all rows of a block."""
    return [head.network.read_out(block_outputs(head, **read), None)]


@torch.no_grad()
@pytest.mark.oracle("dflash")
@pytest.mark.parametrize("name", DFLASH)
def test_a_dflash_drafter_has_the_logits_of_its_own_library(name, tmp_path):
    head = StoredHead(name, tmp_path)
    assert head.strategy == "dflash" and distance(block_logits(head), head.logits) < NEAR


@torch.no_grad()
@pytest.mark.refuses("dflash")
def test_a_dflash_drafter_that_lacks_a_state_would_be_noticed(tmp_path):
    head = StoredHead("dflash", tmp_path)
    assert distance(block_logits(head, read=2), head.logits) > 100 * NEAR


@torch.no_grad()
@pytest.mark.refuses("dflash")
@pytest.mark.parametrize("name, wrong", [
    ("dflash, causal windows", {"sliding_window_non_causal": True}),
    ("dflash, windows", {"sliding_window_non_causal": False}),
    ("dflash, windows", {"speculators_model_type": None, "dflash_config": {"mask_token_id": MASK}}),
])  # fmt: skip
def test_a_window_that_is_read_in_another_way_would_be_noticed(name, wrong, tmp_path):
    """The last one counts the window from each row, as the authors do."""
    head = StoredHead(name, tmp_path, **wrong)
    assert distance(block_logits(head), head.logits) > 100 * NEAR


@pytest.mark.parametrize("anchored", [False, True])
def test_a_drafter_from_its_anchor_drafts_one_token_more(anchored, tmp_path):
    """Its first draft is the guess of the row that reads the newest token."""
    head = StoredHead("dflash, from its anchor", tmp_path, sample_from_anchor=anchored)
    drafter = find("dflash")(weights="random")
    drafter.begin_fitted(head.weights)
    drafter.network = head.network
    seen = []
    drafter.draft = lambda lm, hidden, rows, tree: seen.append(hidden[rows]) or iter(())
    drafter._catch_up, drafter._filled = lambda lm: None, lambda lm: torch.arange(4.0)[:, None]
    list(drafter.drafted(SimpleNamespace(target=SimpleNamespace(behind=lambda: 1)), 9))
    assert seen[0].flatten().tolist() == ([0, 1, 2, 3] if anchored else [1, 2, 3])
