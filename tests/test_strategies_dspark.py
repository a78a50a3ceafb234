"""DSpark: logits of its own library, a known table of followers, and how much is verified, by trying every length."""
from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from pairs import VOCABULARY

from playground.contract import find
from playground.contract.token_tree import TokenTree
from playground.errors import Refusal
from support.draft_heads import head, is_greedy, proposals, random_weights, written
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane
from support.speculators_heads import ANCHOR, TOKENS
from support.stored_heads import NEAR, REFERENCE, StoredHead, block_outputs, distance

NAME, DEPTH = "dspark", 5
BRIEF = {"dspark": {"weights": "random", "depth": 2}}
COLLAPSES = {"dspark": collapses("dspark", weights="random", depth=0)}
KINDS = [name for name in REFERENCE if name.startswith("dspark")]


def taught(stored: StoredHead, shift: int = 0) -> list[torch.Tensor]:
    """Logits of the block with the bias of the true tokens before, and of their confidence; `shift`: of others."""
    network, drafter, state, found = stored.network, find(NAME)(), None, []
    drafter.begin_fitted(stored.weights)
    hidden = block_outputs(stored)
    for row, output in enumerate(hidden):
        before = torch.tensor(drafter.before(TOKENS[ANCHOR + shift:], row))
        vectors = network.vectors(before, output)
        logits, state = network.corrected(network.read_out(output, None), vectors, output, state)
        found.append((logits, network.confidence_head(output, vectors)))
    logits, sure = (torch.stack(each) for each in zip(*found))
    return [logits, sure[:, None]]


@torch.no_grad()
@pytest.mark.oracle("dspark")
@pytest.mark.parametrize("name", KINDS)
def test_both_heads_have_the_logits_of_their_own_library(name, tmp_path):
    stored = StoredHead(name, tmp_path)
    assert stored.strategy == NAME and distance(taught(stored), stored.logits) < NEAR


@torch.no_grad()
@pytest.mark.refuses("dspark")
def test_the_token_of_the_row_in_place_of_the_one_before_would_be_noticed(tmp_path):
    stored = StoredHead(KINDS[0], tmp_path)
    assert distance(taught(stored, shift=1), stored.logits) > 100 * NEAR


@torch.no_grad()
@pytest.mark.refuses("dspark")
def test_a_drafter_from_its_anchor_that_is_read_as_dflash_would_be_noticed(tmp_path):
    stored = StoredHead("dspark, rnn", tmp_path, sample_from_anchor=False)
    assert distance(taught(stored), stored.logits) > 100 * NEAR


def test_a_confidence_head_that_reads_something_else_is_refused_when_it_is_read(tmp_path, monkeypatch):
    wrong = {**REFERENCE[KINDS[0]]["shapes"], "confidence_head.proj.weight": [1, 99]}
    monkeypatch.setitem(REFERENCE[KINDS[0]], "shapes", wrong)
    with pytest.raises(Refusal, match="no network can be made of"):
        StoredHead(KINDS[0], tmp_path)


# --- a table of followers ---

FOLLOWER = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))


def followers() -> dict[str, torch.Tensor]:
    """Weights whose block guesses nothing, and whose table names one follower of each token."""
    plain = random_weights("dflash")
    return plain | {
        "norm.weight": torch.zeros_like(plain["norm.weight"]),
        "markov_head.markov_w1.weight": torch.eye(VOCABULARY, dtype=torch.float64),
        "markov_head.markov_w2.weight": 30 * torch.eye(VOCABULARY, dtype=torch.float64)[FOLLOWER].T,
    }


def chain_after(token: int, length: int) -> set[tuple[int, ...]]:
    found = []
    for _ in range(length):
        token = int(FOLLOWER[token])
        found.append(token)
    return {tuple(found[:count]) for count in range(1, length + 1)}


def wrong_rounds(cls=None) -> list:
    drafter = head(NAME, followers(), cls, depth=DEPTH, verify="all")
    found = [each for each in proposals(drafter) if each.budget >= DEPTH]
    assert len(found) > 3
    return [each for each in found if each.prefixes != chain_after(each.tokens[-1], DEPTH)]


@pytest.mark.oracle("dspark")
def test_every_draft_token_is_the_follower_of_the_one_before():
    assert not wrong_rounds()


class AlwaysTheAnchor(find("dspark")):
    """Wrong: every guess is corrected by the newest token of the text."""

    def before(self, block, row):
        return block[0]


class TheOther(find("dspark")):
    """Wrong: the table is read from the token before the one before."""

    def before(self, block, row):
        return block[max(0, row - 2)]


@pytest.mark.refuses("dspark")
@pytest.mark.parametrize("wrong", [AlwaysTheAnchor, TheOther])
def test_other_tokens_before_are_detected(wrong):
    assert wrong_rounds(wrong)


@pytest.mark.strategy("dspark")
def test_without_heads_it_drafts_as_dflash():
    mine, theirs = (
        [(each.tokens, each.prefixes) for each in proposals(head(name, random_weights("dflash"), depth=DEPTH))]
        for name in (NAME, "dflash")
    )
    assert mine == theirs and len(mine) > 3


# --- how much is verified ---

SECONDS = {1: 1.0, 2: 1.3, 4: 1.5, 8: 2.0}


def best_length(chances: list[float], unread: int) -> int:
    """By trying all: the expected tokens are a sum over how many are accepted."""
    def rate(length: int) -> float:
        reached = [math.prod(chances[:count]) for count in range(length + 1)]
        exactly = [reached[count] * (1 - chances[count] if count < length else 1) for count in range(length + 1)]
        times = [(1, 1.0), (2, 1.3), (3, 1.4), (4, 1.5), (5, 1.625), (6, 1.75), (7, 1.875), (8, 2.0)]
        return sum((1 + count) * share for count, share in enumerate(exactly)) / dict(times)[unread + length]
    return max(range(len(chances) + 1), key=lambda length: (rate(length), -length))


def verified(cls, chances: list[float]) -> int:
    """The length of the tree of a drafter whose confidences are these."""
    drafter = head(NAME, random_weights("dflash"), cls, depth=len(chances), verify="machine")
    drafter._seconds, drafter.network.confidence_head = SECONDS, object()

    def draft(lm, hidden, rows, tree):
        for share in chances:
            tree.add(1, len(tree) - 1, confidence=share)
        yield from ()

    drafter.draft, drafter._catch_up, drafter._filled = draft, lambda lm: None, lambda lm: None
    lm = SimpleNamespace(target=SimpleNamespace(behind=lambda: 1), piece=str, generated=0)
    steps = drafter.drafted(lm, 99)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        assert isinstance(end.value, TokenTree)
        return len(end.value)


def agree(cls=None) -> bool:
    chance = torch.Generator().manual_seed(0)
    cases = [torch.rand(6, generator=chance).tolist() for _ in range(60)]
    cases += [[0.99] * 6, [0.01] * 6, [0.9, 0.1, 0.99] * 2]
    lengths = {best_length(case, 1) for case in cases}
    assert {0, 6} <= lengths and len(lengths) > 3  # the cases tell lengths apart
    return all(verified(cls, case) == best_length(case, 1) for case in cases)


@pytest.mark.oracle("dspark")
def test_as_many_are_verified_as_bring_the_most_tokens_per_second():
    assert agree()


class EachByItself(find("dspark")):
    """Wrong: the chance that a token counts is its own confidence, not the product."""

    def worth(self, reached, unread):
        own = [now / before if before else 0.0 for before, now in zip([1.0, *reached], reached)]
        return super().worth(own, unread)


class RowsWithoutTheText(find("dspark")):
    """Wrong: the row of the newest token is forgotten."""

    def worth(self, reached, unread):
        return super().worth(reached, 0)


@pytest.mark.refuses("dspark")
@pytest.mark.parametrize("wrong", [EachByItself, RowsWithoutTheText])
def test_other_lengths_are_detected(wrong):
    assert not agree(wrong)


@pytest.mark.strategy("dspark")
def test_the_text_is_the_targets():
    assert is_greedy(written(head(NAME, followers(), verify="all")))


@pytest.mark.strategy("dspark")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", depth=2, verify="all")
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
