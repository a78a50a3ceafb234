"""P-EAGLE: logits of its own library, the same rows in forwards without a cache, and one pass in place of several."""
from __future__ import annotations

import pytest
import torch

from playground.algorithms.draft_heads.head_layers import HeadCache, NewRows
from playground.contract import find
from support.draft_heads import differing, embed, head, is_greedy, log_probabilities, random_weights, states, written
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane
from support.speculators_heads import DEPTHS, LAYERS, TOKENS, hidden_states
from support.stored_heads import NEAR, StoredHead, distance

NAME, DEPTH = "p_eagle", 5
BRIEF = {"p_eagle": {"weights": "random", "depth": 2}}
COLLAPSES = {"p_eagle": collapses("p_eagle", weights="random", depth=0)}


def one_pass(stored: StoredHead, first: int = 0, keep: bool = False) -> list[torch.Tensor]:
    """Logits of the row that read the text's last token and of the masks after it, which stand `first` positions late;
    `keep`: after masks of an earlier pass stayed in the cache.
    """
    network, cache, count = stored.network, HeadCache(), len(TOKENS) - 1
    following = network.embedded(TOKENS[1:], stored.target_embed)
    known = network.features(hidden_states(len(LAYERS)))
    rows = [network(following, known, NewRows(cache, torch.arange(count)))[-1:]]
    for _ in range(1 + keep):
        places = torch.arange(count, count + DEPTHS - 1) + first
        masks = network.embedded([int(stored.weights["mask_token_id"])] * (DEPTHS - 1), stored.target_embed)
        rows = [rows[0], network(masks, network.masked(DEPTHS - 1), NewRows(cache, places))]
    return [network.read_out(torch.cat(rows), None)]


@torch.no_grad()
@pytest.mark.oracle("p_eagle")
def test_a_pass_has_the_logits_of_its_own_library(tmp_path):
    stored = StoredHead("peagle", tmp_path)
    assert stored.strategy == NAME and distance(one_pass(stored), stored.logits) < NEAR


@torch.no_grad()
@pytest.mark.refuses("p_eagle")
@pytest.mark.parametrize("wrong", [{"first": -1}, {"keep": True}])
def test_masks_at_the_anchor_and_masks_that_stay_in_the_cache_would_be_noticed(wrong, tmp_path):
    stored = StoredHead("peagle", tmp_path)
    assert distance(one_pass(stored, **wrong), stored.logits) > 100 * NEAR


def weights() -> dict[str, torch.Tensor]:
    drawn = torch.randn(1, 1, 96, generator=torch.Generator().manual_seed(7)).double()
    return random_weights(NAME) | {"mask_hidden": drawn}


def expected(proposal) -> set[tuple[int, ...]]:
    """The chain of one forward of the network over the whole text and the masks, without a cache."""
    network, count = head(NAME, weights()).network, len(proposal.tokens) - 1
    read = states(proposal.tokens[:-1])
    known = network.features(torch.cat([read[layer] for layer in (2, 1, 0)], -1))
    features = torch.cat([known, network.masked(DEPTH - 1)])
    embeddings = embed([*proposal.tokens[1:], *[0] * (DEPTH - 1)])
    rows = network(embeddings, features, NewRows(HeadCache(), torch.arange(count + DEPTH - 1)))[count - 1:]
    best = log_probabilities(network.norm(rows)).argmax(-1).tolist()
    return {tuple(best[:length]) for length in range(1, DEPTH + 1)}


@torch.no_grad()
@pytest.mark.oracle("p_eagle")
@pytest.mark.parametrize("sampled", [False, True])
def test_a_round_is_one_forward_over_the_text_and_the_masks(sampled):
    assert list(differing(head(NAME, weights(), depth=DEPTH), expected, sampled)) == []


class WithoutTheVector(find("p_eagle")):
    """Wrong: masks read states of zeros."""

    @classmethod
    def build(cls, weights):
        return super().build(weights | {"mask_hidden": torch.zeros_like(weights["mask_hidden"])})


class OnePositionEarly(find("p_eagle")):
    """Wrong: the masks begin where the newest token stands."""

    def _masks(self, lm, count):
        return self._text.feed(lm, [self._mask] * count, self.network.masked(count), len(lm.tokens) - 2)


class KeepsMasks(find("p_eagle")):
    """Wrong: masks count as text."""

    def drafted(self, lm, budget):
        tree = yield from super().drafted(lm, budget)
        self._text.cache.length = self._text.cache.rows
        self._text.cache.crop = lambda length: None
        return tree


@torch.no_grad()
@pytest.mark.refuses("p_eagle")
@pytest.mark.parametrize("wrong", [WithoutTheVector, OnePositionEarly, KeepsMasks])
def test_wrong_masks_are_detected(wrong):
    assert list(differing(head(NAME, weights(), wrong, depth=DEPTH), expected))


@pytest.mark.strategy("p_eagle")
def test_depth_one_is_the_first_draft_of_eagle_3():
    shared = random_weights("eagle_3")
    mine = head(NAME, shared | {key: part for key, part in weights().items() if key.startswith("mask")}, depth=1)
    theirs = head("eagle_3", shared, nodes=1, depth=1, width=1)
    texts = {name: [] for name in ("mine", "theirs")}
    from support.draft_heads import proposals
    for name, drafter in (("mine", mine), ("theirs", theirs)):
        texts[name] = [(each.tokens, each.prefixes) for each in proposals(drafter)]
    assert texts["mine"] == texts["theirs"] and len(texts["mine"]) > 5


@pytest.mark.strategy("p_eagle")
def test_the_text_is_the_targets():
    assert is_greedy(written(head(NAME, weights(), depth=DEPTH)))


@pytest.mark.strategy("p_eagle")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", depth=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
