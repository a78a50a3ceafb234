"""First layers as drafter: its draft tokens, their cost, and the unchanged distribution."""
from __future__ import annotations

import pytest
import torch
from architectures import tiny
from pairs import pair
from tables import watch, write

from playground.contract import find
from playground.contract.lane_config import assemble
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.engine.forward_input import ForwardInput
from playground.events import Verdict
from playground.trace import metrics
from support.laws import AT_ONE, EXACT
from support.layered_models import ARCHITECTURES, LIMITS, START, layered
from support.speculation import collapses, speculative_lane

COLLAPSES = {"layer_skip_draft": collapses("layer_skip_draft", depth=0)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("share", [0.05, 0.6, 1.0])
def test_rows_resumed_after_an_early_exit_equal_one_plain_forward(architecture, share):
    model, seen = layered(architecture), None
    rounds = 0
    for lane in watch(
        assemble(speculative_lane("layer_skip_draft", "rejection", AT_ONE, exit=share)),
        {"target": model},
        START,
        LIMITS,
        Draws(0),
    ):
        rows = lane.target.seen
        if rows is seen or rows is None or not len(rows.tree):
            continue
        seen, rounds = rows, rounds + 1
        text = [*rows.committed, *rows.tree.tokens]
        (fresh,), _ = model.forward([ForwardInput(model.new_store(), text, list(range(-1, len(text) - 1)))])
        assert (rows.raw - fresh[len(rows.committed) - 1:]).abs().max() < EXACT
    assert rounds > 2


def chain_by_library(architecture: str, layers: int, text: list[int], length: int) -> list[int]:
    """Argmaxes of the library's head and final norm on what leaves so many layers; each token is a fresh reading."""
    net, chain = tiny(architecture), []
    norm = net.transformer.ln_f if architecture == "gpt2" else net.model.norm
    with torch.no_grad():
        for _ in range(length):
            ids = torch.tensor([text + chain])
            states = net(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
            chain.append(int(net.lm_head(norm(states[layers][0, -1])).argmax()))
    return chain


def check_layer_skip_draft(drafter: type, architecture: str) -> None:
    """At a share of 0.6 the first two of three layers draft."""
    rounds_ = 0
    for text, tree in drafted(drafter(exit=0.6, depth=3), architecture):
        assert tree.tokens == chain_by_library(architecture, 2, text, len(tree))
        rounds_ += len(tree) > 0
    assert rounds_ > 3


def drafted(drafter, architecture: str) -> list[tuple[list[int], TokenTree]]:
    """The text and the draft of every round."""
    seen = []

    class Recording(find("greedy_match")):
        def judge(self, lm, tree, rows):
            seen.append((list(rows.committed), tree))
            return super().judge(lm, tree, rows)

    assembly = assemble(speculative_lane("layer_skip_draft", "greedy_match"))
    assembly.decoder.drafter, assembly.decoder.verifier = drafter, Recording()
    write(assembly, {"target": layered(architecture)}, START, LIMITS, Draws(0))
    return seen


class LeavesALayerEarly(find("layer_skip_draft")):
    def propose(self, lm, budget):
        return (yield from type(self).__base__(exit=self.exit - 1 / lm.depth, depth=self.depth).propose(lm, budget))


class DraftsWithTheWholeModel(find("layer_skip_draft")):
    def propose(self, lm, budget):
        return (yield from type(self).__base__(exit=1.0, depth=self.depth).propose(lm, budget))


@pytest.mark.oracle("layer_skip_draft")
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_draft_equals_the_librarys_lm_head_on_an_inner_layer(architecture):
    check_layer_skip_draft(find("layer_skip_draft"), architecture)


@pytest.mark.refuses("layer_skip_draft")
@pytest.mark.parametrize("wrong", [LeavesALayerEarly, DraftsWithTheWholeModel], ids=lambda cls: cls.__name__)
def test_a_draft_from_another_layer_is_detected(wrong):
    with pytest.raises(AssertionError, match=r"assert \["):
        check_layer_skip_draft(wrong, "llama")


def test_with_all_layers_every_draft_token_is_accepted():
    config = speculative_lane("layer_skip_draft", "rejection", AT_ONE, exit=1.0, depth=5)
    session = prepare(Models(pair().target), [config], Prompt("The green bird"), Limits(0, 19))
    verdicts = [stamped.event for stamped in session if isinstance(stamped.event, Verdict)]
    assert [len(verdict.kept) for verdict in verdicts] == [5, 5, 5] and metrics(session.trace)["acceptance_rate"] == 1
