"""A model's own first layers as its draft: the draft tokens, their cost, and the unchanged output distribution."""
from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from architectures import tiny
from pairs import pair
from tables import TableModel, distance, law, product_law, watch, write
from toys import byte_tokenizer

from playground.algorithms.speculative.speculative_loop import rounds
from playground.contract import Verifier, find, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.engine.attention.segment_attention import Segment
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Draft, Forward, Verdict
from playground.trace import metrics
from support.early_exits import EarlyTable
from support.laws import AT_ONE, EXACT
from support.speculation import GREEDY, collapses, speculative_lane

COLLAPSES = {
    "layer_skip_draft": collapses("layer_skip_draft", depth=0),
}


class BelievesItsFirstLayers(Verifier):
    """Accepts every draft token of a chain."""

    def judge(self, lm, tree, rows):
        return Verdict(kept=list(range(len(tree))), token=lm.pick(rows, len(tree) - 1).token)


class ChecksNothing(find("layer_skip")):
    def decode(self, lm):
        yield from rounds(lm, self.drafter, BelievesItsFirstLayers())


def check_layer_skip(preset: type) -> None:
    """The distribution of three tokens is the full model's."""
    assembly = assemble(LaneConfig("layer_skip", {}, [AT_ONE]))
    assembly.decoder = preset(make("layer_skip_draft", depth=2), make("rejection"))
    found = law(assembly, {"target": EarlyTable("ab")}, [0, 1, 0], 3)
    assert distance(found, product_law(TableModel("ab"), [0, 1, 0], 3)) < EXACT


@pytest.mark.oracle("layer_skip")
def test_layer_skip_keeps_the_full_models_distribution():
    check_layer_skip(find("layer_skip"))


@pytest.mark.refuses("layer_skip")
def test_layer_skip_without_verification_has_another_distribution():
    with pytest.raises(AssertionError, match="distance"):
        check_layer_skip(ChecksNothing)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", "sample_match", "k_seq"])
@pytest.mark.parametrize("letters, ends", [("abc", ""), ("ab.", ".")])
def test_the_output_distribution_is_the_full_models_whatever_early_layers_predict(verifier, letters, ends):
    model = EarlyTable(letters, ends)
    found = law(LaneConfig("layer_skip", {}, [(verifier, {}), AT_ONE]), {"target": model}, [0, 1, 0], 4)
    assert distance(found, product_law(TableModel(letters, ends), [0, 1, 0], 4)) < EXACT


ARCHITECTURES = ("llama", "qwen3", "gemma2", "gpt2")


def layer_skip(share: float) -> LaneConfig:
    return LaneConfig("layer_skip", {}, [("layer_skip_draft", {"exit": share})])


def layered(architecture: str) -> Model:
    return Model(tiny(architecture), byte_tokenizer(), architecture)


LIMITS, START = Limits(0, 18), [5, 9, 2, 7, 7, 1]


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("share", [0.05, 0.6])
def test_early_layer_drafts_do_not_change_the_greedy_text(architecture, share):
    models = {"target": layered(architecture)}
    plain, skipping = (
        write(assemble(config), models, START, LIMITS, Draws(0)).tokens for config in (GREEDY, layer_skip(share))
    )
    assert plain == skipping


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_row_runs_each_layer_once_and_late_layers_run_once_per_round(architecture, monkeypatch):
    passes, original = defaultdict(list), Segment.write

    def counted(segment, layer, keys, values):
        passes[layer].append(keys.shape[1])
        return original(segment, layer, keys, values)

    model = pair(architecture).target
    session = prepare(Models(model), [layer_skip(0.3)], Prompt("a bird"), LIMITS)
    monkeypatch.setattr(Segment, "write", counted)
    recorded = [stamped.event for stamped in session]
    guesses = [len(event.tokens) for event in recorded if isinstance(event, Draft)]
    assert model.depth == 3 and guesses
    # the last token of the text and every draft token; for the last token nothing is drafted
    rounds = [1 + count for count in guesses] + [1]
    assert passes[1] == passes[2] and passes[1][1:] in (rounds, rounds[:-1]), (
        "late layers: the prompt, and then once a round"
    )
    assert len(passes[0]) == 1 + sum(passes[1][1:]) and sum(passes[0]) == sum(passes[1]), (
        "first layers: one row after another, none twice"
    )


def test_forwards_of_the_first_layers_are_reported_as_such_and_counted_as_drafts():
    session = prepare(Models(pair().target), [layer_skip(0.3)], Prompt("a bird"), LIMITS)
    recorded = [stamped.event for stamped in session]
    passes = [event for event in recorded if isinstance(event, Forward) and event.phase == "decode"]
    early, late = ([event for event in passes if event.stream == stream] for stream in ("exit", "target"))
    rounds = [event for event in recorded if isinstance(event, Verdict)]
    found = metrics(session.trace)
    plain = len(late) - len(rounds)  # at the end, where there is room for one token only
    assert {event.layers for event in early} == {1} and [event.layers for event in late] == [2] * len(rounds) + [
        3
    ] * plain
    assert (found["draft_forwards"], found["target_forwards"]) == (len(early), len(rounds) + plain)
    assert found["wasted_tokens"] == sum(event.tokens for event in late) - (found["tokens"] - 1)


def test_with_all_layers_every_draft_token_is_accepted():
    config = speculative_lane("layer_skip_draft", "rejection", AT_ONE, exit=1.0, depth=5)
    session = prepare(Models(pair().target), [config], Prompt("The green bird"), Limits(0, 19))
    verdicts = [stamped.event for stamped in session if isinstance(stamped.event, Verdict)]
    assert [len(verdict.kept) for verdict in verdicts] == [5, 5, 5] and metrics(session.trace)["acceptance_rate"] == 1


@pytest.mark.parametrize("share, layers", [(0.05, 1), (0.45, 1), (0.55, 2), (0.95, 3)])
def test_a_share_of_three_layers_is_rounded_to_at_least_one(share, layers):
    session = prepare(Models(pair().target), [layer_skip(share)], Prompt("a bird"), Limits(0, 4))
    assert {
        stamped.event.layers
        for stamped in session
        if isinstance(stamped.event, Forward) and stamped.event.stream == "exit"
    } == {layers}


def test_another_drafter_is_refused_with_layer_skip():
    with pytest.raises(Refusal, match=r"for Draft model choose Speculative decoding\.$"):
        assemble(LaneConfig("layer_skip", {}, [("draft_model", {})]))
