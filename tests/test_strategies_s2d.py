"""S2D: nested sub-networks computed anew with the library's Llama over whole texts, and their exits by hand."""
from __future__ import annotations

from functools import cache

import pytest
import torch
from pairs import pair
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from playground.contract import find
from playground.errors import Refusal
from playground.training.head_fitting import OwnTexts
from strategies.speculative.s2d import NestedNetwork, exits_of, predictions
from support.draft_heads import DEPTH, WIDTH, differing, head, library, random_weights
from support.laws import AT_ONE, EXACT, WRONG, off, tables
from support.online_drafting import speculation
from support.small_head_texts import SmallTexts, trained
from support.speculation import collapses, speculative_lane

NAME, LENGTH = "s2d", 4
BRIEF = {"s2d": {"weights": "random", "depth": 2}}
COLLAPSES = {"s2d": collapses("s2d", weights="random", depth=0)}


@cache
def nested() -> LlamaForCausalLM:
    """The library's Llama with the head's layers, and the target's embeddings and lm_head."""
    weights, target = random_weights(NAME), library()
    config = LlamaConfig(
        vocab_size=320, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=DEPTH,
        num_attention_heads=1, num_key_value_heads=1, head_dim=WIDTH, rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config).double().eval()
    own = {f"model.{name}": tensor for name, tensor in weights.items() if name != "exits"}
    embeddings = target.get_input_embeddings().weight
    model.load_state_dict(
        {**own, "model.embed_tokens.weight": embeddings, "lm_head.weight": target.lm_head.weight}, strict=True
    )
    return model.requires_grad_(False)


def exit_logits(text: list[int]) -> list[Tensor]:
    """Logits [V] after a text, of each sub-network."""
    model = nested()
    found = model(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False)
    inner = [model.model.norm(states[0, -1]) for states in found.hidden_states[1:-1]]
    return [model.lm_head(states) for states in [*inner, found.hidden_states[-1][0, -1]]]


def chain(text: list[int], threshold: float) -> list[tuple[int, int]]:
    """Draft tokens, each with the number of the exit that drafted it."""
    path: list[tuple[int, int]] = []
    for _ in range(LENGTH):
        found = exit_logits(text + [token for token, _ in path])
        exit = next((i for i, logits in enumerate(found[:-1]) if logits.softmax(-1).max() > threshold), len(found) - 1)
        path.append((int(found[exit].argmax()), exit))
    return path


def expected(threshold: float):
    def prefixes(proposal):
        tokens = [token for token, _ in chain(proposal.tokens, threshold)]
        return {tuple(tokens[:length]) for length in range(1, LENGTH + 1)}

    return prefixes


def drafter(threshold: float, cls=None):
    return head(NAME, random_weights(NAME), cls, threshold=threshold, depth=LENGTH)


MIXED = 0.025  # every exit is taken at times


@pytest.mark.oracle("s2d")
@pytest.mark.parametrize("threshold", [0.0, MIXED, 1.0])
def test_every_draft_is_that_of_whole_forwards_and_the_first_confident_exit(threshold):
    assert list(differing(drafter(threshold), expected(threshold))) == []


def test_every_exit_is_taken_at_this_threshold():
    made = drafter(MIXED)
    list(differing(made, expected(MIXED)))
    assert set(made._used) == {1, 2, 3}


class WithoutCatchingUp(find(NAME)):
    """Wrong: deeper layers never read the tokens that left early."""

    def _cascade(self, lm, tokens):
        self._waiting = [rows[:0] for rows in self._waiting]
        return super()._cascade(lm, tokens)


class WithoutTheNorm(find(NAME)):
    """Wrong: inner exits read the state without the final norm."""

    def drafted(self, lm, budget):
        norm, self.network.norm = self.network.norm, torch.nn.Identity()
        self.network.norm.weight = norm.weight
        return (yield from super().drafted(lm, budget))


class KeepsRejected(find(NAME)):
    """Wrong: what waits for deeper layers includes tokens that were rejected."""

    def _forget(self, tokens):
        waiting = list(self._waiting)
        super()._forget(tokens)
        if waiting:
            self._waiting = waiting


class OneLengthForAllLayers(find(NAME)):
    """Wrong: rows stand at the position that the first layer has reached, in every layer."""

    def _through(self, number, rows):
        ahead = self._caches[0].rows - self._caches[self.network.groups[number][0]].rows if number else 0
        network, first = self.network.layers, self.network.groups[number][0]
        layer = network[first]
        moved = Shifted(layer, ahead)
        network[first] = moved
        try:
            return super()._through(number, rows)
        finally:
            network[first] = layer


class Shifted(torch.nn.Module):
    """A layer whose rows stand some positions later."""

    def __init__(self, layer, by: int):
        super().__init__()
        self.layer, self.by = layer, by

    def forward(self, rows, place):
        place.positions = place.positions + self.by
        return self.layer(rows, place)


@pytest.mark.refuses("s2d")
@pytest.mark.parametrize("wrong", [WithoutCatchingUp, WithoutTheNorm, KeepsRejected, OneLengthForAllLayers])
def test_holes_in_deeper_caches_wrong_positions_and_a_missing_norm_are_detected(wrong):
    try:
        assert list(differing(drafter(MIXED, wrong), expected(MIXED)))
    except RuntimeError:  # caches of different lengths may not fit together at all
        pass


@pytest.mark.slow
@pytest.mark.strategy("s2d")
@pytest.mark.parametrize("verifier, threshold", [("rejection", 0.5), ("sample_match", 1.0)])
def test_the_distribution_is_the_targets(verifier, threshold):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", depth=2, threshold=threshold)
    assert off(lane, tables("ab"), [0, 1, 0], 4) < EXACT


class TheMostProbableAsIfSampled(find(NAME)):
    """Wrong: the most probable token is drafted and verified as if it had been sampled, as in the released code."""

    def drafted(self, lm, budget):
        draw, lm.draw = lm.draw, lambda q, *key: int(q.argmax()) if key[1].startswith("draft") else draw(q, *key)
        try:
            return (yield from super().drafted(lm, budget))
        finally:
            lm.draw = draw


@pytest.mark.refuses("s2d")
def test_drafting_the_argmax_with_a_soft_q_changes_the_distribution():
    wrong = speculation(TheMostProbableAsIfSampled(weights="random", depth=2), AT_ONE)
    assert off(wrong, tables("ab"), [0, 1, 0], 3) > WRONG


# --- training ---

def test_the_copy_has_as_many_layers_as_in_the_paper():
    assert exits_of(32) == [4, 8, 12] and exits_of(8) == [1, 2, 3] and exits_of(1) == [1]


def losses(weights, texts) -> list[float]:
    with torch.no_grad():
        found = predictions(NestedNetwork.of(weights), texts, texts.batch)
        return [float(cross_entropy(states @ texts.lm_head.T, labels)) for states, labels in found]


def test_training_improves_every_exit_and_keeps_their_order():
    texts = SmallTexts(length=6, epoch=12)
    copied = NestedNetwork.copied(texts.first_layers(3), [1, 2, 3]).state_dict()
    before, after = losses(copied, texts), losses(trained(NAME, texts)[0], texts)
    assert all(late < early - 0.1 for early, late in zip(before, after))
    assert after[0] >= after[1] >= after[2]


def test_the_first_layers_of_the_target_are_copied_and_another_family_is_refused(tmp_path):
    texts = OwnTexts(NAME, pair().target, (3,), [], 0, tmp_path / "none")
    first = texts.first_layers(2)
    network = NestedNetwork.copied(first, [1, 2]).double()
    with torch.no_grad():
        found = list(network.whole(library().get_input_embeddings()(torch.tensor([[5, 6, 7]]))))
        expected_states = library()(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states[1:3]
        normed = [library().model.norm(states) for states in expected_states]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, normed))
    with pytest.raises(Refusal, match="not of the Llama family"):
        OwnTexts(NAME, pair("gpt_neox").target, (3,), [], 0, tmp_path / "none").first_layers(1)
