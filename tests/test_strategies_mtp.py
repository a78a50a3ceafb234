"""Multi-token prediction: the library's own generation with the layers of a checkpoint, round by round."""
from __future__ import annotations

import pytest
import torch
from pairs import TOKENIZER, greedy_text, pair
from safetensors.torch import load_file, save_file
from tables import write
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator

from playground.contract import find, make
from playground.contract.lane_config import Assembly
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.decoding.session import Models
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Failed
from support.draft_heads import PROMPT, Watching
from support.laws import AT_ONE, EXACT, off, tables
from support.mtp_checkpoints import COUNT, save_checkpoint
from support.speculation import collapses, speculative_lane
from support.speculative_runs import recorded

NAME, LENGTH = "mtp", 24
BRIEF = {"mtp": {"depth": 2}}
COLLAPSES = {"mtp": collapses("mtp", depth=0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(path)
    return path


def network(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def target(folder) -> Model:
    return Model(network(folder), TOKENIZER, "ernie")


@pytest.fixture(scope="module")
def library(folder):
    """Of each round of the library's generation the text and the candidates, and the whole text."""
    found, get = [], MTPCandidateGenerator.get_candidates

    def kept(self, input_ids, *args, **kwargs):
        candidates, logits = get(self, input_ids, *args, **kwargs)
        if logits is not None:
            found.append((input_ids[0].tolist(), candidates[0, input_ids.shape[1]:].tolist()))
        return candidates, logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MTPCandidateGenerator, "get_candidates", kept)
        given = {"use_mtp": True, "do_sample": False, "max_new_tokens": LENGTH}
        text = network(folder).generate(torch.tensor([PROMPT]), **given)
    return found, text[0].tolist()


def rounds(target: Model, cls=None) -> tuple[list, list[int]]:
    """The same of a lane."""
    decoder, watching = make("speculative", verifier="greedy_match"), Watching((cls or find(NAME))())
    decoder.drafter = watching
    lane = write(Assembly(decoder), {"target": target}, PROMPT, Limits(0, LENGTH), Draws(0))
    drafted = [each for each in watching.proposals if each.prefixes]
    return [(each.tokens, list(max(each.prefixes, key=len))) for each in drafted], lane.tokens


def agrees(found: list, expected: list) -> bool:
    """Whether all rounds are the same, up to the last, which may not draft as deep as it would."""
    whole = [each for each in found if len(each[1]) == COUNT]
    assert len(whole) > 8
    return whole == expected[:len(whole)]


@pytest.mark.oracle("mtp")
def test_every_round_is_that_of_the_librarys_generator(target, library):
    (found, text), (expected, whole) = rounds(target), library
    assert agrees(found, expected) and text == whole


class TokensOffByOne(find("mtp")):
    """Wrong: a layer reads the token whose state it reads."""

    def propose(self, lm, budget):
        states = lm.target_model.mtp.states
        lm.target_model.mtp.states = lambda number, rows, tokens, first, cache: states(
            number, rows, [lm.tokens[first - number - 1], *tokens[:-1]], first, cache
        )
        try:
            return (yield from super().propose(lm, budget))
        finally:
            del lm.target_model.mtp.states


class StateOfTheLayerBefore(find("mtp")):
    """Wrong: the first layer reads the input of the target's last layer."""

    def state_layers(self, depth):
        return depth - 1, depth

    def propose(self, lm, budget):
        of = lm.target.states.of
        lm.target.states.of = lambda layer, start: of(layer - 1, start)
        try:
            return (yield from super().propose(lm, budget))
        finally:
            del lm.target.states.of


class KeepsStaleRows(find("mtp")):
    """Wrong: rows that read rejected tokens stay in the cache."""

    def propose(self, lm, budget):
        if self._text is not None:
            self._text._drop_stale = lambda tokens, length: None
        return (yield from super().propose(lm, budget))


@pytest.mark.refuses("mtp")
@pytest.mark.parametrize("wrong", [TokensOffByOne, StateOfTheLayerBefore, KeepsStaleRows])
def test_wrong_tokens_states_and_caches_are_detected(wrong, target, library):
    assert not agrees(rounds(target, wrong)[0], library[0])


@pytest.mark.strategy("mtp")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    assert off(speculative_lane(NAME, verifier, AT_ONE), tables("abc"), [0, 1, 0], 3) < EXACT


@pytest.mark.strategy("mtp")
def test_random_layers_leave_greedy_text_unchanged():
    assert rounds(pair().target)[1][len(PROMPT):] == greedy_text("llama", PROMPT, LENGTH)


@pytest.mark.strategy("mtp")
def test_a_model_without_such_layers_is_refused_before_the_run():
    _, events = recorded(speculative_lane(NAME, "greedy_match"), Models(pair("qwen2").target))
    assert isinstance(events[-1], Failed) and "no layers for multi-token prediction" in events[-1].message


@pytest.mark.strategy("mtp")
def test_a_checkpoint_without_its_layers_is_refused(folder, tmp_path):
    save_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    save_file({name: tensor for name, tensor in whole.items() if "mtp" not in name}, file, {"format": "pt"})
    with pytest.raises(Refusal, match="are not in its files"):
        _ = Model(network(tmp_path), TOKENIZER, "ernie").mtp
