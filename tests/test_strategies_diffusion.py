"""Masked diffusion: which positions are filled, how many at once, and the texts that result."""
from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from tables import Enumerating, Law, TableModel, distance
from torch import Tensor
from torch.special import entr

import playground
from playground.contract import CanvasDecoder, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.canvas import Canvas, check_fit
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder, Silent
from playground.decoding.rng import Draws
from playground.engine.canvas.table_denoiser import OracleDenoiser
from playground.errors import Refusal
from playground.events import Commit, Event, Failed, Fill, Note
from playground.trace import Trace, check
from playground.trace.lane_metrics import metrics
from strategies.diffusion.masked_diffusion import MaskedDiffusion
from support.denoiser_lanes import (
    ORACLE,
    ORDERS,
    answer,
    canvas,
    conditional,
    law_of,
    over,
    passes,
    random_table,
    recorded,
    session,
)


def decoder(**knobs) -> MaskedDiffusion:
    return make("masked_diffusion", **knobs)


def drive(model: OracleDenoiser, strategy: CanvasDecoder, seed: int = 0) -> list[Event]:
    """Events of an unregistered decoder."""
    assembly = assemble(LaneConfig("masked_diffusion", {"temperature": getattr(strategy, "temperature", 0.0)}))
    assembly.decoder = strategy
    runner, events = Runner(canvas(model, assembly, seed=seed), assembly), []
    while not runner.finished:
        events += runner.advance()
    return events


def fills(events: list[Event]) -> list[Fill]:
    return [event for event in events if isinstance(event, Fill)]


def law(table: Tensor, strategy: CanvasDecoder) -> Law:
    """Exact probability of every string the strategy may write."""
    model, draws, found = over(table), Enumerating(), defaultdict(float)
    for _ in draws.runs():
        found[tuple(written(model, strategy, draws))] += draws.weight
    return dict(found)


def written(model: OracleDenoiser, strategy: CanvasDecoder, draws: Draws | Enumerating) -> list[int]:
    assembly = assemble(LaneConfig("masked_diffusion", strategy.values()))
    assembly.decoder = strategy
    lane = Canvas([], {"target": model}, assembly, Limits(), Silent(model.tokens))
    lane.draws = draws
    runner = Runner(lane, assembly)
    while not runner.finished:
        assert not [event for event in runner.advance() if isinstance(event, Failed)]
    return lane.ids


# --- the distribution of texts ---

@pytest.mark.oracle("masked_diffusion")
@pytest.mark.parametrize("letters, length", [(3, 2), (2, 3)])
@pytest.mark.parametrize("order", ["left_to_right", "entropy", "margin", "random"])
def test_one_token_per_forward_at_temperature_one_follows_the_table(order, letters, length):
    table = random_table(letters, length)
    assert distance(law(table, decoder(order=order, temperature=1.0)), law_of(table)) < 1e-12


def test_low_confidence_order_is_biased_above_temperature_zero_even_at_one_token_per_forward():
    table = random_table(2, 3)
    assert distance(law(table, decoder(order="low_confidence", temperature=1.0)), law_of(table)) > 0.01


class Stale(MaskedDiffusion):
    """Wrong: it continues with proposals made before anything was filled."""

    def decode(self, lm) -> Iterator:
        rows = yield lm.read()
        for position in lm.masked:
            yield lm.fill([position], [lm.pick(rows, position)], [1.0])


@pytest.mark.refuses("masked_diffusion")
def test_reusing_stale_proposals_changes_the_distribution():
    table = random_table(3, 3)
    assert distance(law(table, Stale(temperature=1.0)), law_of(table)) > 0.01


def test_several_tokens_per_forward_cost_exactly_their_total_correlation():
    """KL(table || written) is the sum over forwards of the total correlation of the tokens filled together."""
    table = random_table(2, 4, seed=4)
    found = law(table, decoder(order="left_to_right", steps=2, temperature=1.0))
    kl = sum(p * math.log(p / found[text]) for text, p in law_of(table).items())

    def h(*positions: int) -> float:
        others = [i for i in range(4) if i not in positions]
        return float(entr(table.sum(others) if others else table).sum())

    first = h(0) + h(1) - h(0, 1)
    second = h(0, 1, 2) + h(0, 1, 3) - h(0, 1) - h(0, 1, 2, 3)
    assert kl == pytest.approx(first + second, abs=1e-12) and first > 0.01 and second > 0.01


def test_all_tokens_of_one_forward_are_sampled_independently():
    table = random_table(3, 3)
    alone = {
        text: math.prod(conditional(table, {}, i)[token] for i, token in enumerate(text)) for text in law_of(table)
    }
    assert distance(law(table, decoder(steps=1, temperature=1.0)), alone) < 1e-12


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_of_one_position_are_left_to_right_decoding(order):
    table = random_table(3, 3, seed=1)
    assert distance(law(table, decoder(order=order, block_length=1, temperature=1.0)), law_of(table)) < 1e-12
    greedy = {}
    for position in range(3):
        row = conditional(table, greedy, position)
        greedy[position] = row.index(max(row))
    assert list(law(table, decoder(order=order, block_length=1))) == [tuple(greedy.values())]


# --- which positions are filled ---

def preference(order: str, row: list[float]) -> float:
    """Priority of a position, by its probabilities; its proposal is the most probable token."""
    best, second, *_ = sorted(row, reverse=True)
    return {
        "low_confidence": best,
        "margin": best - second,
        "entropy": sum(p * math.log(p) for p in row),
        "left_to_right": 0.0,
    }[order]


def misplaced(table: Tensor, order: str, events: list[Event]) -> int:
    """Fills of one position each that were not the first in order, or whose confidence is not the table's probability.
    """
    revealed, wrong = {}, 0
    for fill in fills(events):
        (position,), (token,), (confidence,) = fill.positions, fill.ids, fill.confidences
        rows = {i: conditional(table, revealed, i) for i in range(table.ndim) if i not in revealed}
        wrong += (
            position != max(rows, key=lambda i: preference(order, rows[i]))
            or abs(confidence - rows[position][token]) > 1e-9
        )
        revealed[position] = token
    return wrong


@pytest.mark.oracle("masked_diffusion")
@pytest.mark.parametrize("order", ["low_confidence", "margin", "entropy", "left_to_right"])
def test_the_chosen_order_decides_which_position_is_filled_first(order):
    for seed in range(5):
        table = random_table(3, 4, seed)
        assert misplaced(table, order, recorded(over(table), order=order)) == 0


@pytest.mark.parametrize("order", ["margin", "entropy"])
def test_a_temperature_changes_neither_order_nor_confidence(order):
    for seed in range(5):
        table = random_table(3, 4, seed)
        assert misplaced(table, order, recorded(over(table), seed=seed, order=order, temperature=0.3)) == 0


class Tempered(MaskedDiffusion):
    """Wrong: it ranks positions by scores after the temperature."""

    def _ranked(self, lm, rows, proposed) -> Iterator[int]:
        return iter(sorted(proposed, key=lambda position: float(entr(rows.p[position]).sum())))


@pytest.mark.refuses("masked_diffusion")
def test_an_order_by_tempered_scores_is_another_order():
    tables = [random_table(3, 4, seed) for seed in range(5)]
    assert sum(misplaced(table, "entropy", drive(over(table), Tempered(temperature=0.3))) for table in tables) > 0


def test_of_tied_positions_the_first_is_filled():
    even = over(torch.full([2] * 4, 1 / 16, dtype=torch.float64))
    for order in ("low_confidence", "margin", "entropy", "left_to_right"):
        assert [fill.positions for fill in fills(recorded(even, order=order))] == [[0], [1], [2], [3]]


def test_every_random_order_occurs():
    model = over(random_table(2, 3))
    courses = {
        tuple(fill.positions[0] for fill in fills(recorded(model, seed=seed, order="random"))) for seed in range(60)
    }
    assert len(courses) == 6


# --- how many, and when decoding ends ---

@pytest.mark.parametrize("length, block", [(4, 4), (4, 2), (5, 5), (5, 2), (6, 4), (6, 1)])
def test_every_position_is_filled_once_in_exactly_the_requested_forwards(length, block):
    model, blocks = over(random_table(2, length)), math.ceil(length / block)
    for steps in range(1, length + 2):
        events = recorded(model, steps=steps, block_length=block)
        assert sorted(position for fill in fills(events) for position in fill.positions) == list(range(length))
        # a forward fills at least one position, of one block only
        assert passes(events) == len(fills(events)) == min(max(steps, blocks), length)


def test_positions_per_forward_differ_by_one_at_most_the_larger_first():
    shares = [len(fill.positions) for fill in fills(recorded(over(random_table(2, 5)), steps=3))]
    assert shares == [2, 2, 1]


@pytest.mark.parametrize("order", ORDERS)
def test_no_position_is_filled_before_its_block(order):
    events = recorded(over(random_table(2, 6)), order=order, block_length=2, temperature=1.0)
    assert [position // 2 for fill in fills(events) for position in fill.positions] == [0, 0, 1, 1, 2, 2]
    assert [event.text for event in events if isinstance(event, Note)] == [
        "Positions 1 to 2 are filled, and the next block begins.",
        "Positions 3 to 4 are filled, and the next block begins.",
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_threshold_above_one_fills_one_position_per_forward(temperature):
    for seed in range(4):
        model = over(random_table(3, 4, seed))
        sure = recorded(model, seed=seed, rule="threshold", threshold=1.05, temperature=temperature)
        assert fills(sure) == fills(recorded(model, seed=seed, temperature=temperature))


def test_a_threshold_of_zero_takes_one_forward_per_block():
    assert passes(recorded(over(random_table(2, 6)), rule="threshold", threshold=0.0, block_length=2)) == 3


def test_a_threshold_fills_all_positions_that_reach_it_or_the_first_in_order():
    table = random_table(2, 5, seed=1)
    events, revealed, together = recorded(over(table), rule="threshold", threshold=0.65), {}, []
    for fill in fills(events):
        best = {i: max(conditional(table, revealed, i)) for i in range(5) if i not in revealed}
        sure = [i for i, p in best.items() if p >= 0.65]
        assert fill.positions == (sure or [max(best, key=best.get)])
        revealed.update(zip(fill.positions, fill.ids))
        together.append(len(sure))
    assert 0 in together and max(together) > 1


def test_an_end_token_in_a_full_block_ends_the_text_without_another_forward():
    model = OracleDenoiser.from_texts(["go on", "go on and on and on"], [3.0, 1.0])
    events = recorded(model, model.tokens.encode("go"), block_length=2)
    assert passes(events) == 2 and answer(events) == " on"
    assert fills(events)[-1].positions == [2, 3, 4, 5] and set(fills(events)[-1].ids) == set(model.end_ids)


# --- the events of the lane ---

def test_events_are_reproducible_and_independent_of_other_lanes():
    configs = [LaneConfig("masked_diffusion", {"order": order, "temperature": 1.0, "steps": 6}) for order in ORDERS]
    prompt = ORACLE.tokens.encode("the")
    together = session(ORACLE, *configs, prompt=prompt, seed=3).trace
    for i, config in enumerate(configs):
        alone = session(ORACLE, config, prompt=prompt, seed=3).trace
        assert fills([s.event for s in together.lane(i).events]) == fills([s.event for s in alone.events])


@pytest.mark.parametrize(
    "knobs", [{}, {"steps": 3, "temperature": 1.0}, {"rule": "threshold"}, {"block_length": 4, "order": "random"}]
)
def test_a_run_is_a_valid_trace_that_survives_json(knobs):
    trace = session(ORACLE, LaneConfig("masked_diffusion", knobs), prompt=ORACLE.tokens.encode("my")).trace
    assert check(trace) == []
    again = Trace.from_json(json.loads(json.dumps(trace.to_json(), allow_nan=False)))
    assert [stamped.to_json() for stamped in again.events] == [stamped.to_json() for stamped in trace.events]


def test_the_text_is_one_commit_whose_log_probabilities_are_the_confidences():
    events = recorded(ORACLE, ORACLE.tokens.encode("in"), seed=1, steps=4, temperature=1.0)
    filled = {
        position: confidence for fill in fills(events) for position, confidence in zip(fill.positions, fill.confidences)
    }
    (commit,) = [event for event in events if isinstance(event, Commit)]
    assert [math.exp(logprob) for logprob in commit.logprobs] == pytest.approx(
        [filled[i] for i in range(len(commit.ids))]
    )
    assert commit.ids[-1] in ORACLE.end_ids and not set(commit.ids[:-1]) & ORACLE.end_ids


def test_a_step_shows_the_row_of_the_forward_that_filled_its_position():
    trace = session(
        ORACLE, LaneConfig("masked_diffusion", {"temperature": 1.0}), prompt=ORACLE.tokens.encode("the")
    ).trace
    filled = {fill.positions[0]: fill.confidences[0] for fill in fills([stamped.event for stamped in trace.events])}
    steps = [stamped.event for stamped in trace.events if stamped.event.kind == "step"]
    assert [step.position for step in steps] == list(range(len(steps)))
    for step in steps:
        assert next(c.raw for c in step.top if c.id == step.chosen) == pytest.approx(filled[step.position], abs=1e-6)


def test_tokens_per_forward_are_the_text_length_over_the_forwards():
    found = metrics(
        session(ORACLE, LaneConfig("masked_diffusion", {"steps": 3}), prompt=ORACLE.tokens.encode("the")).trace
    )
    assert found["target_forwards"] == 3 and found["tokens_per_target_forward"] == pytest.approx(found["tokens"] / 3)
    assert found["wasted_tokens"] is None and found["mean_entropy"] is not None


def test_a_stop_string_ends_the_text_and_not_the_canvas():
    assembly = assemble(LaneConfig("masked_diffusion"))
    lane = Canvas(
        ORACLE.tokens.encode("two"), {"target": ORACLE}, assembly, Limits(stop=("boat",)), Recorder(ORACLE.tokens)
    )
    runner = Runner(lane, assembly)
    while not runner.finished:
        runner.advance()
    assert (lane.text, lane.reason, lane.masked) == (" sailors row their boat", "stop_string", [])


# --- refusals ---

def refused(extras=(), **limits) -> str:
    with pytest.raises(Refusal) as refusal:
        assembly = assemble(LaneConfig("masked_diffusion", {}, [(name, knobs) for name, knobs in extras]))
        Canvas(ORACLE.tokens.encode("the"), {"target": ORACLE}, assembly, Limits(**limits), Recorder(ORACLE.tokens))
    assert str(refusal.value).endswith(".")
    return str(refusal.value)


def test_strategies_without_meaning_on_a_canvas_are_refused():
    assert "allow at least 12" in refused(max_new_tokens=5)
    assert "cannot begin with other tokens" in refused(forced=(3,))
    assert "does not work with a sampler" in refused(extras=[("top_p", {})])
    assert "judges a text from its beginning" in refused(extras=[("regex", {"pattern": "a"})])
    assert "does not work with a cache policy" in refused(extras=[("sink_window", {})])
    assert "no slot for Prompt lookup, a drafter" in refused(extras=[("prompt_lookup", {})])


def test_an_autoregressive_model_is_refused_for_a_canvas_and_the_oracle_for_plain_decoding():
    with pytest.raises(Refusal, match="table continues text .*: choose pocket-diffusion or the oracle"):
        check_fit(decoder(), TableModel("abc"))
    with pytest.raises(Refusal, match="oracle fills masked positions .*: choose Masked diffusion or another model"):
        check_fit(make("greedy"), ORACLE)
    check_fit(make("greedy"), TableModel("abc"))
    check_fit(decoder(), ORACLE)


def test_plain_decoding_of_the_oracle_is_refused_with_a_cache_policy_too():
    with pytest.raises(Refusal, match="oracle fills masked positions"):
        playground.run({"strategy": "greedy", "extras": ["h2o"]}, "the", models=playground.load("oracle"))


class FillsTwice(CanvasDecoder):
    def decode(self, lm) -> Iterator:
        yield lm.fill([0], [1], [1.0])
        yield lm.fill([0, 1], [1, 1], [1.0, 1.0])


class FillsUneven(CanvasDecoder):
    def decode(self, lm) -> Iterator:
        yield lm.fill([0, 1], [1], [1.0])


class ForgetsToYield(CanvasDecoder):
    def decode(self, lm) -> Iterator:
        lm.fill([0], [1], [1.0])
        yield lm.fill([1], [1], [1.0])


WRONG = [(FillsTwice(), "each is filled once"), (FillsUneven(), "shorter"), (ForgetsToYield(), "write `yield lm.fill")]


@pytest.mark.parametrize("wrong, said", WRONG)
def test_a_decoder_that_fills_wrongly_is_reported(wrong, said, caplog):
    events = drive(over(random_table(2, 3)), wrong)
    assert isinstance(events[-1], Failed) and said in events[-1].message
