"""Hidden Transfer: pseudo states through the library's own upper layers, after the states of the whole text."""
from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from drafting_runs import recorded
from pairs import greedy_text, pair
from tables import write

from playground.contract import Drafter, find, make
from playground.contract.assembly import Assembly
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.events import Forward, Verdict
from support.draft_heads import (
    LENGTH,
    PROMPT,
    Watching,
    differing,
    head,
    library,
    proposals,
    random_weights,
    states,
    written,
)
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, KNOBS = "hidden_transfer", {"nodes": 9, "depth": 3, "ranks": 3}
BRIEF = {"hidden_transfer": {"weights": "random", "nodes": 5, "depth": 2, "ranks": 2}}
COLLAPSES = {"hidden_transfer": collapses("hidden_transfer", weights="random", nodes=0)}
LAYER = 1  # of three


@torch.no_grad()
def upper_logits(before: torch.Tensor, pseudo: torch.Tensor):
    """Logits [k, V] of pseudo states [k, d] after the states of a text [n, d], in the library's upper layers."""
    model, rows = library().model, torch.cat([before, pseudo])[None]
    count = rows.shape[1]
    places = model.rotary_emb(rows, torch.arange(count)[None])
    mask = torch.full((count, count), float("-inf"), dtype=rows.dtype).triu(1)[None, None]
    for layer in model.layers[LAYER:]:
        rows = layer(rows, attention_mask=mask, position_embeddings=places)
        rows = rows[0] if isinstance(rows, tuple) else rows
    return library().lm_head(model.norm(rows))[0, -len(pseudo):]


def expected(proposal):
    weights = {name: tensor.double() for name, tensor in random_weights(NAME).items()}
    before = states(proposal.tokens[:-proposal.unread])[LAYER]
    pseudo = torch.stack([weights[f"transfer.{step}.weight"] @ before[-1] for step in range(3)])
    lists = upper_logits(before, pseudo)[proposal.unread - 1:].topk(3).indices.tolist()
    shares = weights["accuracy"][proposal.unread - 1:, :3].tolist()
    paths = [path for depth in range(1, len(lists) + 1) for path in product(range(3), repeat=depth)]
    best = sorted(paths, key=lambda path: (-prod(shares[d][r] for d, r in enumerate(path)), path))[:9]
    return {tuple(lists[depth][rank] for depth, rank in enumerate(path)) for path in best}


@pytest.mark.oracle("hidden_transfer")
@pytest.mark.parametrize("phase", ["one", "two"])
def test_draft_tokens_are_read_from_the_pseudo_states_after_the_upper_layers(phase):
    assert list(differing(head(NAME, random_weights(NAME), phase=phase, **KNOBS), expected)) == []


class Helped(find("hidden_transfer")):
    """Drafts the right token too, so that rounds end after draft tokens; `own` are its drafts without it, by text."""

    def drafted(self, lm, budget):
        tree = yield from super().drafted(lm, budget)
        drafted = {tuple(tree.prefix(node)) for node in range(len(tree))}
        self.own = {**getattr(self, "own", {}), tuple(lm.tokens): drafted}
        right = greedy_text("llama", PROMPT, LENGTH + 1)[lm.generated]
        if right not in [tree.tokens[child] for child in tree.children(ROOT)]:
            tree.add(right, ROOT)
        tree.probes = self._pseudo_rows(tree, budget)
        return tree


def mistaken(cls: type[Helped]) -> int:
    """In how many of the rounds after accepted draft tokens the drafts are not those computed anew."""
    drafter = Watching(head(NAME, random_weights(NAME), cls, phase="one", **KNOBS))
    assert written(drafter) == greedy_text("llama", PROMPT, LENGTH)
    own = {text: drafts for text, drafts in drafter.drafter.own.items() if drafts}
    whole = [proposal for proposal in drafter.proposals if proposal.budget >= KNOBS["depth"]]
    pairs = [(proposal, drafts) for proposal in whole if (drafts := own.get(tuple(proposal.tokens)))]
    assert len(pairs) > 5 and len(drafter.proposals) < LENGTH - 4, "too few draft tokens were accepted"
    return sum(drafts != expected(proposal) for proposal, drafts in pairs)


@pytest.mark.oracle("hidden_transfer")
def test_after_accepted_draft_tokens_the_guesses_are_those_of_the_last_of_them():
    assert not mistaken(Helped)


class EntersAtTheWrongLayer(Helped):
    """Wrong: the maps read the state a layer further on, and the pseudo states enter there."""

    def drafted(self, lm, budget):
        tree = yield from super().drafted(lm, budget)
        tree.entering = tree.entering[0] + 1, tree.entering[1]
        return tree


class GuessesOfTheRoot(Helped):
    """Wrong: the guesses after the last token that was committed before the round are used."""

    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, verdict)
        if rows.probes is not None:
            self._guesses.logits = rows.probes[:self.depth]


class FollowsTheNextStep(Helped):
    """Wrong: the first step is left out, as if the token after the last accepted one had been read."""

    def drafted(self, lm, budget):
        if self._guesses.logits is not None:
            self._guesses.logits = self._guesses.logits[1:]
        return (yield from super().drafted(lm, budget))


@pytest.mark.refuses("hidden_transfer")
@pytest.mark.parametrize("wrong", [EntersAtTheWrongLayer, GuessesOfTheRoot, FollowsTheNextStep])
def test_wrong_layers_nodes_and_steps_in_one_forward_are_detected(wrong):
    assert mistaken(wrong)


def test_one_forward_a_round_verifies_and_drafts():
    forwards = {}
    for phase in ("one", "two"):
        session, events = recorded(speculative_lane(NAME, "greedy_match", weights="random", nodes=4, phase=phase))
        rounds = sum(isinstance(event, Verdict) for event in events)
        forwards[phase] = sum(isinstance(event, Forward) for event in events) - rounds
    assert forwards["one"] < 4 < 15 < forwards["two"], "beside the prompt, a forward for each draft"


class StateOfAnotherLayer(find("hidden_transfer")):
    """Wrong: the maps read the state before the first layer."""

    def state_layers(self, depth):
        return LAYER, 0

    def drafted(self, lm, budget):
        of = lm.target.states.of
        lm.target.states.of = lambda layer, start: of(0, start)
        try:
            return (yield from super().drafted(lm, budget))
        finally:
            del lm.target.states.of


class EntersALayerLate(find("hidden_transfer")):
    """Wrong: the pseudo states skip a layer."""

    def drafted(self, lm, budget):
        resume = lm.target.resume
        lm.target.resume = lambda layer, rows: resume(layer + 1, rows)
        try:
            return (yield from super().drafted(lm, budget))
        finally:
            del lm.target.resume


class StepsInReverse(find("hidden_transfer")):
    """Wrong: the map of the last step predicts the next token's state."""

    @classmethod
    def build(cls, weights):
        network = super().build(weights)
        network.transfer = network.transfer[::-1]
        return network


@pytest.mark.refuses("hidden_transfer")
@pytest.mark.parametrize("wrong", [StateOfAnotherLayer, EntersALayerLate, StepsInReverse])
def test_wrong_layers_and_maps_are_detected(wrong):
    assert list(differing(head(NAME, random_weights(NAME), wrong, phase="two", **KNOBS), expected))


class TrueStates(Drafter):
    """Lets the true states of the last token that was read enter again, one position later, and records the logits."""

    def __init__(self):
        self.found = []

    def __deepcopy__(self, memo):
        return self

    def state_layers(self, depth):
        return (LAYER,)

    def propose(self, lm, budget):
        if lm.target.behind() and lm.target.states.length > 3:
            read, token = lm.tokens[:lm.target.states.length], lm.tokens[-1]
            true = states([*read, token])[LAYER][-1:]
            self.found.append(([*read, token], (yield lm.target.resume(LAYER, true))))
        return TokenTree("true")


@pytest.mark.strategy("hidden_transfer")
def test_with_the_true_state_the_logits_are_those_of_the_next_token():
    decoder, drafter = make("speculative", verifier="greedy_match"), TrueStates()
    decoder.drafter = drafter
    write(Assembly(decoder), {"target": pair().target}, PROMPT, Limits(0, 8), Draws(0))
    assert len(drafter.found) > 4
    for text, logits in drafter.found:
        with torch.no_grad():
            expected_row = library()(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        assert (logits[0] - expected_row).abs().max() < 1e-6


@pytest.mark.strategy("hidden_transfer")
@pytest.mark.parametrize("phase", ["one", "two"])
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier, phase):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=6, phase=phase)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT


@pytest.mark.strategy("hidden_transfer")
@pytest.mark.parametrize("phase", ["one", "two"])
def test_random_maps_leave_greedy_text_and_cache_unchanged(phase):
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = head(NAME, random_weights(NAME), nodes=9, phase=phase)
    lane = write(Assembly(decoder), {"target": pair().target}, PROMPT, Limits(0, 16), Draws(0))
    assert lane.tokens[len(PROMPT):] == greedy_text("llama", PROMPT, 16)
    assert lane.target.store.length <= len(lane.tokens) and not lane.target.store.parents


def test_nothing_is_drafted_deeper_than_the_text_may_grow():
    found = proposals(head(NAME, random_weights(NAME), nodes=40))
    assert all(max(map(len, proposal.prefixes)) <= proposal.budget for proposal in found)
