"""A model's own first layers as its draft: the draft tokens, their cost, and the unchanged output distribution."""
from __future__ import annotations

from collections import defaultdict

import pytest
from pairs import pair
from tables import TableModel, distance, law, product_law, write

from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.engine.attention.segment_attention import Segment
from playground.events import Draft, Forward, Verdict
from playground.trace import metrics
from support.early_exits import EarlyTable
from support.laws import AT_ONE, EXACT
from support.layered_models import ARCHITECTURES, LIMITS, START, layered
from support.speculation import GREEDY


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", "sample_match", "k_seq"])
@pytest.mark.parametrize("letters, ends", [("abc", ""), ("ab.", ".")])
def test_the_output_distribution_is_the_full_models_whatever_early_layers_predict(verifier, letters, ends):
    model = EarlyTable(letters, ends)
    found = law(LaneConfig("layer_skip", {}, [(verifier, {}), AT_ONE]), {"target": model}, [0, 1, 0], 4)
    assert distance(found, product_law(TableModel(letters, ends), [0, 1, 0], 4)) < EXACT


def layer_skip(share: float) -> LaneConfig:
    return LaneConfig("layer_skip", {}, [("layer_skip_draft", {"exit": share})])


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


@pytest.mark.parametrize("share, layers", [(0.05, 1), (0.45, 1), (0.55, 2), (0.95, 3)])
def test_a_share_of_three_layers_is_rounded_to_at_least_one(share, layers):
    session = prepare(Models(pair().target), [layer_skip(share)], Prompt("a bird"), Limits(0, 4))
    assert {
        stamped.event.layers
        for stamped in session
        if isinstance(stamped.event, Forward) and stamped.event.stream == "exit"
    } == {layers}
