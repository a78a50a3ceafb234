"""The contract of compute policies: what they leave out is not computed, and what they say ran is what ran."""
from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from pairs import pair
from registry import corners, lanes, registered, title
from runs import figures, run
from tables import write

import playground
from playground.contract import ComputePolicy, LayerChoices, SharedFeedForward, find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Failed, Forward
from support.compute_runs import PROMPT, counted_products, deep, policy_lane, text_and_forwards

PICTURE = "share of each layer that ran for the newest tokens"
SHARE = "share of the layers' weights that ran"
POLICIES = [cls.name for cls in registered("compute_policy")]
CORNERS = [(cls.name, knobs) for cls in registered("compute_policy") for knobs in corners(cls)]


class RunsAll(ComputePolicy):
    """Leaves nothing out."""

    def choices(self, positions, prompt):
        return LayerChoices()


class Lottery(LayerChoices):
    """Runs a part that depends on position and layer, so that rows of one forward differ."""

    def __init__(self, positions: list[int]):
        self._positions = positions

    def feed_forwards(self, layer, hidden, full):
        rows = [row for row, position in enumerate(self._positions) if (position + layer) % 3]
        return [SharedFeedForward(rows, full)] if rows else []


class SkipsByPosition(ComputePolicy):
    """Skips every third feed-forward network of a token."""

    def choices(self, positions, prompt):
        return Lottery(positions)


class SkipsBySize(ComputePolicy):
    """What runs depends on how many rows the forward has, which is refused as row-wise."""

    row_wise = False

    def choices(self, positions, prompt):
        return Lottery([len(positions)] * len(positions))


def with_policy(config: LaneConfig, policy: ComputePolicy) -> Assembly:
    assembly = assemble(config)
    assembly.compute_policy = policy
    return assembly


def lossless() -> list[LaneConfig]:
    """Greedy lanes that a compute policy may be added to."""
    return [config for config in lanes("greedy_identical") if _accepted(config)]


def _accepted(config: LaneConfig) -> bool:
    try:
        assemble(LaneConfig(config.strategy, config.knobs, [*config.extras, ("ffn_skip", {})]))
        return True
    except Refusal:
        return False


def test_nothing_left_out_is_plain_decoding_with_the_same_flops():
    models = {"target": deep()}
    plain, forwards = text_and_forwards(LaneConfig("greedy"), models)
    same, computed = text_and_forwards(with_policy(LaneConfig("greedy"), RunsAll()), models)
    assert same == plain
    assert [each.flops for each in computed] == [each.flops for each in forwards]
    assert [each.layers for each in computed] == [6] * len(computed)


@pytest.mark.parametrize("name, knobs", CORNERS, ids=str)
def test_the_flops_that_are_reported_were_computed(name, knobs, monkeypatch):
    """Without attention over the context, which is no product with weights."""
    monkeypatch.setattr(Model, "flops_saved", lambda self, rows, context, compute: 2.0 * compute.idle_weights)
    model = deep()
    with counted_products(model.fused) as part:
        lane, events = run(policy_lane(name, **knobs), {"target": model}, PROMPT, 16)
    with counted_products(model.fused) as whole:
        written, plain = text_and_forwards(LaneConfig("greedy"), {"target": model}, len(lane.main.written))
    assert len(written) == len(lane.main.written) > 3, "as many rows are computed"
    saved = sum(each.flops for each in plain) - sum(each.flops for each in events if isinstance(each, Forward))
    assert saved == pytest.approx(2 * (whole[0] - part[0]), abs=1.0) and saved >= -1e-6


@pytest.mark.parametrize("config", lossless(), ids=title)
def test_lossless_decoding_under_a_policy_writes_what_greedy_writes_under_it(config):
    """The rows of a draft tree are each computed as if they were alone."""
    models = {"target": pair().target, "draft": pair().draft}
    plain, lossless_, without = (
        write(with_policy(lane, policy), models, PROMPT, Limits(0, 14), Draws(0)).tokens
        for lane, policy in (
            (LaneConfig("greedy"), SkipsByPosition()), (config, SkipsByPosition()), (LaneConfig("greedy"), None)
        )
    )
    assert lossless_ == plain != without


def acting(name: str) -> dict:
    """Knobs of a policy with which greedy decoding writes another text; the policy's default where none does."""
    plain = written_by(LaneConfig("greedy"))
    texts = ((knobs, written_by(policy_lane(name, **knobs))) for knobs in corners(find(name)))
    return next((knobs for knobs, text in texts if text != plain), {})


def written_by(config: LaneConfig | Assembly) -> list[int]:
    assembly = config if isinstance(config, Assembly) else assemble(config)
    models = {"target": pair().target, "draft": pair().draft}
    return write(assembly, models, PROMPT, Limits(0, 14), Draws(0)).tokens


def of_several_rows() -> list[LaneConfig]:
    """Decoders whose forwards have several rows after the prompt, each with settings at which its text is greedy's."""
    drafted = [config for config in lossless() if "greedy_match" in dict(config.extras) or config.strategy == "pearl"]
    texts = [LaneConfig(name, {"n": 3, "temperature": 0.0}) for name in ("best_of_n", "self_consistency", "mbr")]
    return [*drafted, *texts, LaneConfig("beam_search", {"beams": 1})]


def differing(plain: Assembly, added) -> list[str]:
    """Decoders of several rows that write another text than plain decoding under a policy, refused ones left out."""
    text = written_by(plain)
    return [title(config) for config in of_several_rows() if (lane := added(config)) and written_by(lane) != text]


def assembled(config: LaneConfig) -> Assembly | None:
    try:
        return assemble(config)
    except Refusal:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_decoders_of_several_rows_write_what_greedy_writes_under_the_same_policy(name):
    knobs = acting(name)
    plain = assemble(policy_lane(name, **knobs))
    assert differing(
        plain, lambda config: assembled(replace(config, extras=[*config.extras, (name, knobs)]))
    ) == []


@pytest.mark.parametrize("name", POLICIES)
def test_speculation_with_the_bundled_models_writes_what_greedy_writes_under_a_fitted_policy(name):
    models = bundled()
    plain, *drafted = (
        playground.run("speculative" if drafter else "greedy", "What is 12 + 7?", chat=True, models=models,
                       extras=[*drafter, name], max_new_tokens=16).text
        for drafter in ((), ("draft_model", "greedy_match"), ("prompt_lookup", "greedy_match"))
    )
    assert plain and set(drafted) == {plain}


@cache
def bundled() -> Models:
    return playground.load(dtype="float64")


@pytest.mark.slow
def test_a_policy_that_acts_on_forwards_of_one_row_alone_differs_under_decoders_of_several_rows():
    plain = with_policy(LaneConfig("greedy"), SkipsBySize())
    assert len(differing(plain, lambda config: with_policy(config, SkipsBySize()))) > 10


def test_a_policy_that_is_not_row_wise_drops_the_guarantee_of_lossless_lanes():
    config = LaneConfig("speculative", {}, [("draft_model", {}), ("rejection", {})])
    assert "greedy_identical" in with_policy(config, SkipsByPosition()).guarantee()
    assert with_policy(config, SkipsBySize()).guarantee() == ["heuristic"]


@pytest.mark.parametrize("policy", [SkipsByPosition(), None], ids=["skipping", "plain"])
def test_keys_and_values_of_every_layer_are_held_if_attention_always_runs(policy):
    lane = write(with_policy(LaneConfig("greedy"), policy), {"target": deep()}, PROMPT, Limits(0, 10), Draws(0))
    store = lane.target.store
    assert {keys.read(store.length).shape for keys in store.keys} == {(2, store.length, 8)}


def test_the_picture_shows_what_ran_for_every_committed_token():
    assembly = with_policy(LaneConfig("speculative", {}, [("draft_model", {}), ("greedy_match", {})]),
                           SkipsByPosition())
    models = {"target": pair().target, "draft": pair().draft}
    lane, events = run(assembly, models, PROMPT, 12)
    pictures = figures(events, PICTURE)
    layer = models["target"].fused.layers[0]
    attention = (layer.qkv.weight.numel() + layer.out.weight.numel()) / (
        layer.qkv.weight.numel() + layer.out.weight.numel() + layer.ffn.weights)
    expected = [[round(1.0 if (len(PROMPT) - 1 + number + depth) % 3 else attention, 3)
                 for number in range(lane.generated)] for depth in range(models["target"].depth)]
    assert pictures[-1]["values"] == expected
    assert pictures[-1]["columns"] == [lane.piece(token) for token in lane.main.written]
    shares = [data["series"]["share"] for data in figures(events, SHARE)]
    assert shares == pytest.approx([sum(column) / len(column) for column in zip(*expected)], abs=1e-3)


def test_two_lanes_with_a_policy_and_without_share_nothing():
    session = prepare(pair(), [LaneConfig("greedy"), policy_lane("ffn_skip"), policy_lane("ffn_skip")],
                      Prompt("The green bird"), Limits(0, 6))
    events = [stamped for stamped in session]
    assert not [each for each in events if isinstance(each.event, Failed)]
    assert {each.event.lanes for each in events if isinstance(each.event, Forward) and each.lane > 0} == {1}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_refused_where_layers_run_in_the_library(name):
    with pytest.raises(Refusal, match="choose another model than gpt2"):
        run(policy_lane(name), {"target": pair("gpt2").target}, PROMPT, 4)


@pytest.mark.parametrize("name, extras", product(POLICIES, [
    [("layer_skip_draft", {}), ("rejection", {})],
    [("del_exit", {}), ("rejection", {})],
]))
def test_a_policy_is_refused_beside_early_exits(name, extras):
    with pytest.raises(Refusal, match="runs some layers alone"):
        assemble(LaneConfig("speculative", {}, [*extras, (name, {})]))


@pytest.mark.parametrize("name, cutting", product(POLICIES, ["fastkv", "uncomp"]))
def test_a_policy_is_refused_beside_a_prompt_that_is_shortened_between_layers(name, cutting):
    with pytest.raises(Refusal, match="needs the keys and values of every layer"):
        assemble(LaneConfig("greedy", {}, [(cutting, {}), (name, {})]))


def test_a_policy_works_with_samplers_a_constraint_and_a_cache_policy():
    config = LaneConfig("greedy", {}, [("temperature", {}), ("regex", {"pattern": "(ab|cd)+"}),
                                       ("h2o", {"heavy": 3, "recent": 3}), ("ffn_skip", {"threshold": 0.0})])
    events = [stamped.event for stamped in prepare(pair(), [config], Prompt("The green bird"), Limits(0, 12))]
    assert not [event for event in events if isinstance(event, Failed)]
