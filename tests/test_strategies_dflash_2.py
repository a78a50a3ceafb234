"""DFlash 2: logits, candidates and scores by its own library, and a known table of followers."""
from __future__ import annotations

import pytest
import torch
from pairs import VOCABULARY

from playground.contract import find
from playground.errors import Refusal
from support.draft_heads import head, is_greedy, proposals, random_weights, written
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane
from support.speculators_heads import ANCHOR, TOKENS
from support.stored_heads import NEAR, REFERENCE, StoredHead, block_outputs, distance

NAME, WIDTH, DEPTH = "dflash_2", 32, 5
BRIEF = {"dflash_2": {"weights": "random", "depth": 2}}
COLLAPSES = {"dflash_2": collapses("dflash_2", weights="random", depth=0)}


def selected(stored: StoredHead, shift: int = 0) -> list[torch.Tensor]:
    """Logits of the block, the candidates of its rows, and their scores after the true tokens before; `shift`: after
    others.
    """
    network, drafter, hidden = stored.network, find(NAME)(), block_outputs(stored)
    drafter.begin_fitted(stored.weights)
    base = network.read_out(hidden, lambda rows: rows @ stored.all["lm_head.weight"].T)
    found = base.topk(drafter._candidates).indices
    scores = [
        network.candidate_selector.scores(base[row], hidden[row], drafter.before(TOKENS[ANCHOR + shift:], row), each)
        for row, each in enumerate(found)
    ]
    return [base, found.float(), torch.stack(scores)]


@torch.no_grad()
@pytest.mark.oracle("dflash_2")
def test_logits_candidates_and_scores_are_those_of_its_own_library(tmp_path):
    stored = StoredHead("dflash2", tmp_path)
    assert stored.strategy == NAME and distance(selected(stored), stored.logits) < NEAR


@torch.no_grad()
@pytest.mark.refuses("dflash_2")
def test_pairs_with_another_token_would_be_noticed(tmp_path):
    stored = StoredHead("dflash2", tmp_path)
    assert distance(selected(stored, shift=1), stored.logits) > 100 * NEAR


def across(rows, kernel):
    """Wrong: the first row reads the last one, as if blocks were joined."""
    return sum(rows.roll(tap, 0) * kernel[:, tap] for tap in range(kernel.shape[1]))


def later(rows, kernel):
    """Wrong: a row reads its right neighbour."""
    return sum(rows.roll(-tap, 0) * kernel[:, tap] for tap in range(kernel.shape[1]))


@torch.no_grad()
@pytest.mark.refuses("dflash_2")
@pytest.mark.parametrize("wrong", [across, later])
def test_a_convolution_over_other_rows_would_be_noticed(wrong, tmp_path, monkeypatch):
    stored = StoredHead("dflash2", tmp_path)
    network = stored.network
    monkeypatch.setattr(type(network.layers[0].mlp_conv), "mixed", staticmethod(wrong))
    assert (selected(stored)[0] - stored.logits[0]).abs().max() > 100 * NEAR


def test_groups_that_do_not_divide_the_channels_are_refused_when_it_is_read(tmp_path, monkeypatch):
    wrong = {**REFERENCE["dflash2"]["shapes"], "layers.0.mlp_conv.kernel_projection.weight": [2 * 2 * 5, WIDTH]}
    monkeypatch.setitem(REFERENCE["dflash2"], "shapes", wrong)
    with pytest.raises(Refusal, match="no network can be made of"):
        StoredHead("dflash2", tmp_path)


FOLLOWER = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))


def parts(identity: float = 1.0) -> dict[str, torch.Tensor]:
    """A head of `dflash` with convolutions that change nothing, and pairs that count nothing."""
    double = dict(dtype=torch.float64)
    kernel = torch.zeros(2, 2, WIDTH, **double)
    kernel[:, 0] = identity
    conv = {"base_kernel": kernel, "kernel_projection.weight": torch.zeros(8, WIDTH, **double)}
    book = torch.zeros(VOCABULARY, VOCABULARY, **double)
    return random_weights("dflash") | {
        **{f"layers.0.{name}_conv.{key}": each for name in ("attention", "mlp") for key, each in conv.items()},
        "candidate_selector.predecessor_codebook": book, "candidate_selector.successor_codebook": book,
        "candidate_selector.hidden_projection.weight": torch.zeros(VOCABULARY, WIDTH, **double),
    }


def drafts(name: str, weights, cls=None, **knobs) -> list:
    made = head(name, weights, cls, depth=DEPTH, **knobs)
    return [(each.tokens, each.prefixes) for each in proposals(made) if each.budget >= DEPTH]


@pytest.mark.oracle("dflash_2")
def test_without_convolutions_and_pairs_it_drafts_as_dflash():
    mine, theirs = drafts(NAME, parts()), drafts("dflash", random_weights("dflash"))
    assert mine == theirs and len(mine) > 3


@pytest.mark.refuses("dflash_2")
def test_convolutions_that_change_something_draft_otherwise():
    assert drafts(NAME, parts(0.5)) != drafts("dflash", random_weights("dflash"))


def followers() -> dict[str, torch.Tensor]:
    """Pairs that name one follower of each token, by far; the states of rows have a known sign in one channel."""
    found = parts()
    one_hot = torch.eye(VOCABULARY, dtype=torch.float64)
    projection = torch.zeros(VOCABULARY, WIDTH, dtype=torch.float64)
    found["norm.weight"] = torch.zeros_like(found["norm.weight"])
    return found | {
        "candidate_selector.predecessor_codebook": one_hot,
        "candidate_selector.successor_codebook": one_hot[FOLLOWER.argsort()],
        "candidate_selector.hidden_projection.weight": projection,
    }


def walked(cls=None) -> bool:
    """Whether every guess is the follower of the one before, where all tokens are candidates and pairs decide."""
    made = head(NAME, followers(), cls, depth=DEPTH, candidates=0)
    made._candidates = VOCABULARY
    made.network.candidate_selector.hidden_projection.forward = lambda hidden: torch.ones(VOCABULARY).double()
    found = [each for each in proposals(made) if each.budget >= DEPTH]
    assert len(found) > 3
    return all(each.prefixes == chain_after(each.tokens[-1], DEPTH) for each in found)


def chain_after(token: int, length: int) -> set[tuple[int, ...]]:
    found = []
    for _ in range(length):
        token = int(FOLLOWER[token])
        found.append(token)
    return {tuple(found[:count]) for count in range(1, length + 1)}


class AlwaysTheAnchor(find("dflash_2")):
    """Wrong: all pairs begin with the newest token of the text."""

    def before(self, block, row):
        return block[0]


@pytest.mark.oracle("dflash_2")
def test_the_path_follows_the_pairs():
    assert walked()


@pytest.mark.refuses("dflash_2")
def test_pairs_with_the_anchor_are_no_path():
    assert not walked(AlwaysTheAnchor)


@pytest.mark.strategy("dflash_2")
def test_the_text_is_the_targets():
    assert is_greedy(written(head(NAME, parts(0.5))))


@pytest.mark.strategy("dflash_2")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", depth=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
