"""Studies of recorded runs: the arithmetic of speculation against simulations and closed forms, and figures from
traces.
"""
from __future__ import annotations

import json
import random
from math import log10

import pytest
import torch
from pairs import pair

import playground
from playground.algorithms.speculative.speculation_math import (
    Costs,
    DraftRound,
    acceptance,
    acceptance_by_level,
    block_efficiency,
    block_efficiency_by_level,
    computed_costs,
    draft_parameters,
    line,
    measured_costs,
    overlap,
    rounds,
)
from playground.cli import main
from playground.contract import make
from playground.contract.lane_config import LaneConfig
from playground.decoding.models import Models
from playground.events import Commit, Done, Draft, Figure, Forward, Header, Note, Stamped, Verdict
from playground.events import Test as Trial  # pytest would collect it
from playground.trace import Trace
from playground.trace.plot_style import IN_DARK
from support.plot_colours import colours_of

PROMPT = "The green bird"


# --- made by hand ---

def trace(*events, **header) -> Trace:
    return Trace(
        [Header(**{"strategy": "speculative", **header})],
        [Stamped(0, seq, 0.0, event) for seq, event in enumerate(events)],
    )


def chained(alphas: list[float], gamma: int, count: int, seed: int = 0) -> list[DraftRound]:
    """Rounds of a chain whose draft tokens are accepted by chance, at depth i with alphas[i]."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        kept = next((i for i in range(gamma) if chance.random() >= alphas[i]), gamma)
        found.append(DraftRound(gamma, gamma, kept, kept < gamma, kept + 1))
    return found


def guess(number: int, parents: list[int], kept: list[int], refused: bool, tests: list[Trial] = ()) -> list:
    return [Draft(number, [7] * len(parents), ["x"] * len(parents), parents, [1.0] * len(parents)),
            Verdict(number, kept, list(tests), 5, "y", "redraw" if refused else "bonus")]


def lane(tau: list[int], draft: str, size: float, **header) -> Trace:
    """A lane whose rounds commit so many tokens each, with a draft model of that size."""
    events = [
        event
        for number, tokens in enumerate(tau)
        for event in guess(number, [-1, 0, 1, 2], list(range(tokens - 1)), tokens < 5)
    ]
    passes = [
        Forward("draft", "decode", 1, context, 2, 1, 0.001, 2 * size + 40.0 * (context + 0.5))
        for context in (10, 20, 30)
    ]
    targets = [Forward("target", "decode", rows, 10, 8, 1, 0.008 + 0.002 * rows, 2e9 * rows) for rows in (1, 5)]
    return trace(*events, *passes, *targets, draft=draft, prompt="Once", **header)


# --- the arithmetic ---

def test_expected_tokens_of_a_chain_equal_a_simulation():
    assert block_efficiency(0.7, 4) == pytest.approx(2.773, abs=5e-4)
    found = chained([0.7] * 4, 4, 40_000)
    assert sum(r.tokens for r in found) / len(found) == pytest.approx(block_efficiency(0.7, 4), abs=0.02)


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_a_perfect_draft_yields_every_draft_token_and_one_more(gamma):
    assert block_efficiency(1.0, gamma) == gamma + 1
    assert block_efficiency_by_level([1.0] * gamma, gamma) == gamma + 1


def test_expected_tokens_by_depth_sum_the_survival_probabilities():
    assert block_efficiency_by_level([0.9, 0.5, 0.2], 3) == pytest.approx(1 + 0.9 + 0.45 + 0.09)
    assert block_efficiency_by_level([0.6] * 4, 4) == pytest.approx(block_efficiency(0.6, 4))


def test_acceptance_is_counted_over_tested_draft_tokens():
    found = chained([0.7] * 4, 4, 40_000)
    assert acceptance(found) == pytest.approx(0.7, abs=0.01)
    over_drafted = sum(r.accepted for r in found) / sum(r.levels for r in found)
    assert over_drafted == pytest.approx(0.44, abs=0.01), "accepted over drafted is something else"
    assert acceptance([]) is None


def test_acceptance_by_depth_recovers_the_probability_at_each_depth():
    assert acceptance_by_level(chained([0.9, 0.6, 0.3], 3, 40_000)) == pytest.approx([0.9, 0.6, 0.3], abs=0.02)


def test_predictions_by_depth_equal_measurements_for_drafts_of_one_length():
    found = chained([0.9, 0.6, 0.3], 3, 500)
    measured = sum(r.tokens for r in found) / len(found)
    assert block_efficiency_by_level(acceptance_by_level(found), 3) == pytest.approx(measured)
    assert block_efficiency(acceptance(found), 3) != pytest.approx(measured, abs=0.01), (
        "with one chance for all depths it is not"
    )


@pytest.mark.slow
def test_the_overlap_of_two_models_is_the_mean_clipped_ratio_over_samples():
    chance = torch.Generator().manual_seed(0)
    p, q = (torch.rand(6, generator=chance, dtype=torch.float64).softmax(-1) for _ in range(2))
    draws = q.multinomial(20_000, replacement=True, generator=chance).tolist()
    verdicts = [
        Verdict(i, [], [Trial(0, float(p[x]), float(q[x]), 0.5, False)], 1, "", "redraw") for i, x in enumerate(draws)
    ]
    assert overlap(trace(*verdicts)) == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.005)


def test_the_overlap_excludes_later_siblings_and_deterministic_drafts():
    tests = [Trial(0, 0.2, 0.4, 0.9, False), Trial(1, 0.1, 0.1, 0.1, True), Trial(2, 0.3, 0.3, 0.5, True)]
    assert overlap(trace(Verdict(0, [1, 2], tests))) == pytest.approx((0.5 + 1.0) / 2)
    assert overlap(trace(Verdict(0, [], [Trial(0, 0.2, 0.4, None, False)]))) is None


def test_speed_up_without_draft_tokens_is_one_and_speculation_pays_only_above_the_cost_of_a_draft_token():
    for c in (0.05, 0.3, 0.6):
        costs = Costs(draft=c)
        assert costs.speed_up(1.0, 0, 1) == 1.0
        for alpha in (0.01, 0.2, 0.5, 0.9):
            assert costs.speed_up(block_efficiency(alpha, 1), 1, 2) == pytest.approx((1 + alpha) / (1 + c))
            assert (max(costs.speed_up(block_efficiency(alpha, g), g, g + 1) for g in range(1, 17)) > 1) == (alpha > c)


def test_costs_are_read_from_seconds():
    passes = [Forward("target", "decode", k, 9, 8, 1, 0.010 + 0.002 * k) for k in (1, 5, 9)] + [
        Forward("draft", "decode", 1, 9, 2, 1, 0.003)
    ] * 3
    costs = measured_costs(passes, [])
    assert (costs.draft, costs.row, costs.measured) == (pytest.approx(0.25), pytest.approx(1 / 6), True)


def test_forwards_of_one_size_need_a_plain_lane_to_estimate_the_cost_of_rows():
    own = [Forward("target", "decode", 5, 9, 8, 1, 0.02)]
    assert measured_costs(own, []) == Costs(0.0, 0.0, False)
    assert measured_costs(own, [Forward("target", "decode", 1, 9, 8, 1, 0.01)]).row == pytest.approx(0.25)


def test_costs_exclude_prefill_and_shared_forwards():
    passes = [
        Forward("target", "prefill", 200, 0, 8, 1, 5.0),
        Forward("target", "decode", 1, 9, 8, 3, 9.0),
        Forward("target", "decode", 1, 9, 8, 1, 0.01),
        Forward("target", "decode", 6, 9, 8, 1, 0.01),
        Forward("draft", "prefill", 200, 0, 2, 1, 5.0),
    ]
    assert measured_costs(passes, []) == Costs(0.0, 0.0, True)
    assert measured_costs(passes[:2], []) is None


def test_a_forward_of_the_first_layers_counts_as_drafting():
    passes = [Forward("target", "decode", 4, 9, 8, 1, 0.01, 80.0), Forward("exit", "decode", 1, 9, 2, 1, 0.004, 5.0)]
    assert measured_costs(passes, []).draft == pytest.approx(0.4)
    assert computed_costs(passes).draft == pytest.approx(5 / 20)


def test_the_size_of_a_draft_is_computed_from_its_operations():
    model = pair().draft
    sizes = [(1, 9), (2, 30), (1, 44)]  # rows and context
    passes = [Forward("draft", "decode", *size, model.depth, 1, 0.1, model.flops(*size, model.depth)) for size in sizes]
    assert draft_parameters(passes) == pytest.approx(model.parameters)
    assert draft_parameters(passes[:1]) is None


def test_a_line_goes_through_points_that_lie_on_one():
    xs = [log10(n) for n in (1e6, 3e6, 5e7, 1e9)]
    law = line(xs, [0.5 * x - 2 for x in xs])
    assert (law.slope, law.intercept, law.fit) == pytest.approx((0.5, -2.0, 1.0))
    assert line([0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 0.0, 1.0]).fit == pytest.approx(0.2)


# --- rounds of a trace ---

def test_rounds_count_levels_of_trees_and_distinguish_a_rejection_from_an_end():
    tree = guess(0, [-1, -1, 0, 0, 1], [1, 4], False)
    refused = guess(1, [-1, 0, 1], [0], True)
    silent = [Draft(2, [7], ["x"], [-1], [1.0]), Verdict(2, [0], [], -1)]  # the draft token ended the text
    assert rounds(trace(*tree, *refused, *silent)) == [
        DraftRound(2, 5, 2, False, 3),
        DraftRound(3, 3, 1, True, 2),
        DraftRound(1, 1, 1, False, 1),
    ]


# --- the study ---

def study(*traces: Trace, **knobs) -> list:
    return make("scaling_laws", **knobs).draw(list(traces))


def numbers(report: list) -> dict[str, list]:
    table = next(event for event in report if isinstance(event, Figure) and event.name == "Speculation")
    return dict(zip(table.data["rows"], table.data["values"]))


def notes(report: list) -> str:
    return " ".join(event.text for event in report if isinstance(event, Note))


def test_a_scaling_law_over_three_drafts_is_recovered_exactly():
    traces = [lane([1, 2], "small", 1e7), lane([2, 2], "middle", 1e8), lane([2, 3], "large", 1e9)]
    report = study(*traces)
    law = next(event for event in report if isinstance(event, Figure) and event.name.startswith("Tokens per round"))
    assert law.data["rows"] == ["small", "middle", "large"]
    assert [row[0] for row in law.data["values"]] == pytest.approx([7, 8, 9])
    assert [row[1] for row in law.data["values"]] == pytest.approx([1.5, 2.0, 2.5])
    assert [row[3] for row in law.data["values"]] == pytest.approx([0, 0, 0])
    assert "0.5 log10 N -2, R² = 1.000, over 3" in notes(report)


def test_two_drafts_or_different_prompts_give_no_scaling_law():
    traces = [lane([1, 2], "small", 1e7), lane([2, 2], "middle", 1e8)]
    assert "it needs 3 draft models of known size, and these traces have 2" in notes(study(*traces))
    other = lane([2, 3], "large", 1e9)
    other.headers[0].prompt = "Twice"
    assert "not run on the same prompts" in notes(study(*traces, other))


def test_for_a_draft_without_acceptance_the_best_length_is_zero():
    report = study(lane([1] * 30, "noise", 1e6))
    assert numbers(report)["α from counts"] == [0.0] and numbers(report)["best draft length"] == [0]
    assert numbers(report)["speed-up at that length, predicted"] == [1.0]


def test_the_window_takes_the_last_rounds():
    report = study(lane([1] * 10 + [5] * 10, "draft", 1e6), window=10)
    assert numbers(report)["rounds"] == [10] and numbers(report)["α from counts"] == [1.0]


def test_lanes_that_shared_every_forward_have_no_separate_costs():
    shared = lane([1, 3], "draft", 1e6)
    for stamped in shared.events:
        if isinstance(stamped.event, Forward):
            stamped.event.lanes = 2
    report = study(shared)
    assert numbers(report)["draft cost"] == [None] and "alone" in notes(report)
    assert not any(event.name.startswith("Predicted") for event in report if isinstance(event, Figure))
    assert numbers(study(shared, costs="computed"))["draft cost"][0] > 0, "operations are each lane's own"


def test_predictions_are_labelled_as_such():
    report = study(lane([1, 3, 5], "draft", 1e6))
    assert all("predicted" in row for row in numbers(report) if "speed-up" in row)
    assert any("Predicted" in event.name for event in report if isinstance(event, Figure)) and "Predictions" in notes(
        report
    )


@pytest.fixture(scope="module")
def recorded() -> Trace:
    """A plain and two speculative lanes of random models, the second with the target as its own draft."""
    lanes = [LaneConfig("greedy"), LaneConfig("speculative")]
    results = playground.compare(lanes, PROMPT, models=pair(), max_new_tokens=40)
    return Trace([r.header for r in results], sorted((s for r in results for s in r.trace.events), key=lambda s: s.seq))


@pytest.mark.slow
def test_the_report_of_a_recorded_run_equals_its_events(recorded):
    before = json.dumps(recorded.to_json())
    report = study(recorded.lane(0), recorded.lane(1))
    speculative = [stamped.event for stamped in recorded.lane(1).events]
    drafts, verdicts = ([event for event in speculative if isinstance(event, kind)] for kind in (Draft, Verdict))
    assert numbers(report)["rounds"] == [len(drafts)] == [len(verdicts)]
    assert numbers(report)["tokens per round, measured"] == [
        pytest.approx(sum(len(v.kept) + 1 for v in verdicts) / len(verdicts))
    ]
    tested = sum(len(v.tests) for v in verdicts)
    assert numbers(report)["α from counts"] == [pytest.approx(sum(len(v.kept) for v in verdicts) / tested)]
    assert numbers(report)["cost of a further token"][0] >= 0 and numbers(report)["draft cost"][0] > 0
    assert json.dumps(recorded.to_json()) == before, "a study changes nothing"


def test_a_target_that_drafts_for_itself_is_always_right():
    target = pair().target
    result = playground.run(
        "speculative", PROMPT, models=Models(target, target), max_new_tokens=25, extras=[("draft_model", {"depth": 4})]
    )
    report = study(result.trace)
    assert numbers(report)["α from counts"] == [1.0]
    full = [r for r in rounds(result.trace) if r.levels == 4]
    assert full and all(r.tokens == 5 for r in full)


def test_figures_survive_json(recorded):
    for event in study(recorded.lane(1)):
        assert json.loads(json.dumps(event.to_json(), allow_nan=False))["kind"] in ("figure", "note")


# --- the shell ---

@pytest.fixture
def shell(capsys):
    def call(*words) -> tuple[int, str, str]:
        return main([str(word) for word in words]), *capsys.readouterr()

    return call


def test_the_command_prints_tables_or_json(shell, recorded, tmp_path):
    recorded.save(tmp_path / "t.jsonl")
    code, out, _ = shell("study", "scaling_laws", tmp_path / "t.jsonl", "--set", "gamma_max=3")
    assert code == 0 and "Predicted speed-up, by draft length" in out and "plain decoding: 1.000" in out
    curve = out[out.index("Predicted speed-up"):].split("\n\n")[0].splitlines()
    assert [row.split()[0] for row in curve[2:6]] == ["0", "1", "2", "3"]
    report = json.loads(shell("study", "scaling_laws", tmp_path / "t.jsonl", "--json")[1])
    assert {event["kind"] for event in report} == {"figure", "note"}


@pytest.mark.parametrize(
    "words, says",
    [
        ("study scaling_laws", "F.jsonl"),
        ("study greedy F", "is a decoder"),
        ("study scaling_laws /nowhere", "cannot be opened"),
        ("study scaling_laws F --set gamma_max=99", "between"),
        ("study scaling_laws PLAIN", "uses speculation"),
        ("study scaling_laws BROKEN", "is inconsistent"),
    ],
)
def test_wrong_input_is_refused_in_one_line(shell, tmp_path, words, says):
    trace(Forward(), Commit(0, [1], ["a"], "a", [None], ["sampled"]), Done("length"), prompt="x").save(
        tmp_path / "plain.jsonl"
    )
    trace(Done(), Done()).save(tmp_path / "broken.jsonl")
    words = words.replace("PLAIN", str(tmp_path / "plain.jsonl")).replace("BROKEN", str(tmp_path / "broken.jsonl"))
    code, out, err = shell(*words.split())
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err


# --- the page ---

EVERY_SHAPE = [
    Figure("scalar", "s", {"x": 0, "series": {"a": 1.0, "b": None}, "lines": {"limit": 2.0}}),
    Figure("scalar", "s", {"x": 1, "series": {"a": 3.0, "b": 0.5}}),
    Figure("bars", "b", {"labels": ["p", "q"], "values": [1, 2]}),
    Figure("matrix", "m", {"rows": ["r"], "columns": ["c", "d"], "values": [[1.5, None]]}),
    Figure("tree", "t", {"labels": ["root", "leaf"], "parents": [-1, 0], "values": [1.0, 0.5]}),
    Figure("spans", "p", {"spans": [[2, 5, "copied", 1.0]]}),
    Figure("points", "k", {"points": [[1, -1, "a", "like a", False], [0.5, 2, "b", "", False]]}),
    Figure("points", "k", {"points": [[1, -1, "a", "like a", True]], "path": [[0.5, 0.5, "query 1"]]}),
    Note("So it is."),
]


def test_the_page_draws_every_shape_once():
    from playground.ui.studies.study_figures import draw, drawings, notes
    line_, bars, matrix, tree, spans, points = drawings(EVERY_SHAPE)
    assert [(list(series.x), list(series.y)) for series in line_.data] == [([0, 1], [1.0, 3.0]), ([1], [0.5])] and len(
        line_.layout.shapes
    ) == 1
    assert list(bars.data[0].y) == [1, 2]
    assert matrix.data[0].text[0][0] == "1.5" and matrix.data[0].text[0][1] == ""
    assert list(tree.data[-1].x) == [0, 1]
    assert list(spans.data[0].base) == [2] and list(spans.data[0].x) == [3]
    groups = [(group.name, list(group.x), list(group.marker.symbol)) for group in points.data]
    assert groups == [("like a", [1, 1], ["circle", "x"]), ("others", [0.5], ["circle"])]
    assert [(arrow.text, arrow.x, arrow.ax) for arrow in points.layout.annotations if arrow.text == "query 1"] == [
        ("query 1", 0.5, 0)
    ]
    assert [json.loads(plot.plot)["layout"]["title"]["text"] for plot in draw(EVERY_SHAPE)] == [
        "s",
        "b",
        "m",
        "t",
        "p",
        "k",
    ]
    assert notes(EVERY_SHAPE) == ["So it is."]


def test_every_colour_of_every_shape_has_one_on_a_dark_page():
    from playground.ui.studies.study_figures import drawings
    for figure in drawings(EVERY_SHAPE):
        assert colours_of(figure) and colours_of(figure) <= IN_DARK.keys()
    assert not colours_of(figure.update_traces(marker_color="#0072b2")) <= IN_DARK.keys()


def test_the_shell_prints_every_shape():
    from playground.cli.run_study import printed
    s, b, m, t, p, k, note = printed(EVERY_SHAPE)
    assert s.splitlines() == ["s", "x      a  b", "0  1.000  -", "1  3.000  0.500", "limit: 2.000"]
    assert (
        "2 to 5" in p
        and "  leaf" in t
        and m.splitlines()[2].split() == ["r", "1.500", "-"]
        and b.splitlines()[1].split() == ["p", "1"]
    )
    assert "like a, crossed out" in k and k.splitlines()[-1].split() == ["0.500", "0.500", "query", "1", "arrow"]
    assert note == "So it is."
