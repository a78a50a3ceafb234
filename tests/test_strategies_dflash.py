"""DFlash: the library's own drafter and its generator, round by round, and the library's text."""
from __future__ import annotations

from functools import cache

import pytest
import torch
from pairs import greedy_text, network, pair
from tables import write
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from playground.algorithms.draft_heads.blocks import block_training
from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.training.public_heads import dflash_weights
from support.draft_heads import PROMPT, WIDTH, Watching
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, LENGTH, BLOCK = "dflash", 24, 5
BRIEF = {"dflash": {"weights": "random", "depth": 2}}
COLLAPSES = {"dflash": collapses("dflash", weights="random", depth=0)}


@cache
def library_drafter(kind: str = "full_attention") -> MuseGlimmerAssistantModel:
    """A random drafter of the library's class, whose weights are large enough that every input matters."""
    torch.manual_seed(3)
    config = MuseGlimmerAssistantConfig(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, block_size=BLOCK, mask_token_id=7, target_layer_ids=[0, 2], layer_types=[kind, "full_attention"],
        sliding_window=6, initializer_range=0.4, attn_implementation="eager",
    )  # fmt: skip
    drafter = MuseGlimmerAssistantModel(config).double().eval()
    with torch.no_grad():
        for weights in drafter.parameters():
            if weights.dim() == 1:
                weights += 0.3 * torch.randn_like(weights)
    return drafter.requires_grad_(False)


def ours(cls=None, kind: str = "full_attention"):
    """The strategy with the library's weights, in float64."""
    drafter = library_drafter(kind)
    weights = dflash_weights(drafter.config.to_dict(), drafter.state_dict())
    made = (cls or find(NAME))(weights="random")
    made.begin_fitted(weights)
    made.network = made.build(weights).double().eval().requires_grad_(False)
    return made


def rounds(made) -> list[tuple[list[int], list[int]]]:
    """By round the text, and the draft tokens after it."""
    decoder, watching = make("speculative", verifier="greedy_match"), Watching(made)
    decoder.drafter = watching
    write(Assembly(decoder), {"target": pair().target}, PROMPT, Limits(0, LENGTH), Draws(0))
    return [(each.tokens, list(max(each.prefixes, key=len))) for each in watching.proposals if each.prefixes]


@cache
def library_rounds(kind: str = "full_attention") -> list[tuple[list[int], list[int]]]:
    """The same of the library's generation with its own candidate generator."""
    found, get = [], DFlashTokenCandidateGenerator.get_candidates

    def recorded(self, input_ids, *args, **kwargs):
        candidates, logits = get(self, input_ids, *args, **kwargs)
        if candidates.shape[1] > input_ids.shape[1]:
            found.append((input_ids[0].tolist(), candidates[0, input_ids.shape[1]:].tolist()))
        return candidates, logits

    DFlashTokenCandidateGenerator.get_candidates = recorded
    try:
        target = network("llama")
        target.generation_config.eos_token_id = None
        target.generate(
            torch.tensor([PROMPT]), assistant_model=library_drafter(kind), speculation_type="dflash", do_sample=False,
            max_new_tokens=LENGTH,
        )  # fmt: skip
    finally:
        DFlashTokenCandidateGenerator.get_candidates = get
    return found


def agree(made, kind: str = "full_attention") -> bool:
    """Whether the rounds are the library's, up to the last, where the lengths that may be drafted differ."""
    mine, theirs = rounds(made), library_rounds(kind)
    whole = [pair for pair in mine if len(pair[1]) == BLOCK - 1]
    assert len(whole) > 8
    return whole == theirs[:len(whole)]


@pytest.mark.oracle("dflash")
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_every_round_is_that_of_the_librarys_generator(kind):
    assert agree(ours(kind=kind), kind)


class StatesOfTheLayerBefore(find("dflash")):
    """Wrong: layer i's input is read in place of its output."""

    def begin_fitted(self, weights):
        super().begin_fitted({**weights, "layers": weights["layers"] - 1})


class PositionsOffByOne(find("dflash")):
    """Wrong: the block begins one position late."""

    @classmethod
    def build(cls, weights):
        network = super().build(weights)
        forward = network.forward
        network.forward = lambda rows, positions, caches, first: forward(rows, positions + 1, caches, first)
        return network


class KeepsTheBlock(find("dflash")):
    """Wrong: the block's own keys stay in the cache of the text."""

    def _catch_up(self, lm):
        super()._catch_up(lm)
        for held in self._caches:
            held.crop = lambda length: None


@pytest.mark.refuses("dflash")
@pytest.mark.parametrize("wrong", [StatesOfTheLayerBefore, PositionsOffByOne, KeepsTheBlock])
def test_wrong_layers_positions_and_caches_are_detected(wrong):
    assert not agree(ours(wrong))


RIGHT = block_training.seen_by_blocks  # what the rows of a block see


def trained_as_drafted(seen=RIGHT) -> bool:
    """Whether blocks in a training, which see `seen`, have the outputs that drafting has after each anchor."""
    network = ours().network
    chance = torch.Generator().manual_seed(0)
    states = torch.randn(2, 9, network.fc.in_features, generator=chance, dtype=torch.float64)
    rows = torch.randn(2, 3, BLOCK, WIDTH, generator=chance, dtype=torch.float64)
    anchors = torch.tensor([6, 1, 4])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_training, "seen_by_blocks", seen)
        found = block_training.outputs(network, states, rows, anchors)
    return all(
        torch.allclose(found[text, i], drafted(network, states[text, :anchor], rows[text, i]))
        for text in range(2)
        for i, anchor in enumerate(anchors.tolist())
    )


def drafted(network, states, rows):
    """The outputs for one block [n, width] after the target's states [tokens, reads], as in drafting."""
    caches = network.new_caches()
    network.read(states, torch.arange(len(states)), caches)
    return network(rows, torch.arange(len(states), len(states) + len(rows)), caches, 0)


@pytest.mark.oracle("dflash")
def test_blocks_are_trained_as_they_are_drafted():
    assert trained_as_drafted()


def with_the_anchors_state(anchors, block, tokens):
    """Wrong: a block sees the state of its anchor, which the target has not read when it is drafted."""
    return RIGHT(anchors + 1, block, tokens)


def with_other_blocks(anchors, block, tokens):
    """Wrong: the rows of all blocks see each other."""
    seen = RIGHT(anchors, block, tokens)
    return torch.cat([seen[:, :tokens], torch.ones_like(seen[:, tokens:])], 1)


@pytest.mark.refuses("dflash")
@pytest.mark.parametrize("wrong", [with_the_anchors_state, with_other_blocks])
def test_training_on_what_drafting_does_not_see_would_be_noticed(wrong):
    assert not trained_as_drafted(wrong)


@pytest.mark.strategy("dflash")
def test_the_text_is_the_targets():
    decoder = make("speculative", verifier="greedy_match")
    decoder.drafter = ours()
    lane = write(Assembly(decoder), {"target": pair().target}, PROMPT, Limits(0, LENGTH), Draws(0))
    assert lane.tokens[len(PROMPT):] == greedy_text("llama", PROMPT, LENGTH)


@pytest.mark.strategy("dflash")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", depth=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
