"""An effect counts as shown only if the answers show it: each rule is tested on answers with and without the effect."""
from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from xml.etree import ElementTree

import jsonschema
import pytest

from playground.bench.charts import Chart
from playground.bench.effects import EFFECTS
from playground.bench.effects.answer_comparison import PLAIN
from playground.bench.effects.context_effect import AGAINST, ALIKE, CONTRASTS, context
from playground.bench.effects.effect import Effect, EffectResult, document, page, say
from playground.bench.effects.eviction_effect import BUDGETS, KEPT, eviction
from playground.bench.effects.grammar_effect import BOUND, BOUND_DRAWN, DRAWN, fits, grammar, is_valid
from playground.bench.effects.speculation_effect import AIMS, DRAFTED, LOOKED_UP, speculation
from playground.bench.effects.switching_effect import ALONE, SWITCHES, switching
from playground.bench.effects.voting_effect import polled, votes
from playground.bench.survey.results import Paired, Score
from playground.bench.survey.survey import Answer
from playground.cli import main
from playground.contract.lane_config import assemble
from playground.questions.questions import Question
from playground.questions.world import records

SVG = "{http://www.w3.org/2000/svg}"
Making = Callable[[str, Question, int], dict]


def answers(effect: Effect, make: Making, repeats: int = 1) -> list[Answer]:
    """Answers of all entrants; `make` gives the relevant fields for an entrant and a question."""
    return [
        Answer(
            entrant.name,
            number,
            question,
            round,
            seed=0,
            **{"token_ids": [1], "seconds": 1.0, **make(entrant.name, question, number)},
        )
        for round in range(1, repeats + 1)
        for number, question in enumerate(effect.questions)
        for entrant in effect.entrants
    ]


def shown(effect: Effect, make: Making, repeats: int = 1) -> bool:
    return EffectResult.of(effect, answers(effect, make, repeats)).shown


def scored(right: Callable[[str, Question, int], bool]) -> Making:
    return lambda name, question, number: {"score": float(right(name, question, number))}


# --- switching ---

SWITCHING, GOOD = switching(count=10), "bild below 0.7"


def switches(target: float, loss: float = 0.0, alone: float = 0.5) -> Making:
    """Greedy is always right; one switch makes some forwards of the target a token and loses a share of the questions,
    the draft alone another.
    """
    def make(name: str, question: Question, number: int) -> dict:
        wrong = {PLAIN: 0.0, ALONE: alone, GOOD: loss}.get(name, 1.0)
        forwards = round(100 * (target if name == GOOD else 1.0))
        return {
            "score": float(number % 10 >= 10 * wrong),
            "token_ids": [1] * 101,
            "forwards": {"target": forwards, "draft": 100},
        }

    return make


def test_switching_is_shown_if_few_tokens_need_the_target_and_the_score_stays():
    assert shown(SWITCHING, switches(target=0.3))


@pytest.mark.parametrize(
    "absent", [switches(target=0.7), switches(target=0.3, loss=0.4), switches(target=0.3, alone=0.0)]
)
def test_switching_is_not_shown_if_the_target_writes_much_the_score_falls_or_the_draft_suffices(absent):
    assert not shown(SWITCHING, absent)


def test_a_setting_is_not_chosen_on_the_questions_it_is_tested_on():
    lucky = scored(lambda name, question, number: name == PLAIN or name in SWITCHES and number % 2 == 0)
    verdict = SWITCHING.judge(answers(SWITCHING, lucky))
    assert (
        not verdict.shown and [value.mean for value in verdict.numbers.values() if isinstance(value, Paired)][0] == -1.0
    )


# --- context ---

CONTEXT = context(count=12)


def weighs(against: float, alike: float = 1.0) -> Making:
    """Share of right answers of adacad; greedy is right on every other passage against memory, and on all others."""
    share = {AGAINST: against, ALIKE: alike}
    return scored(
        lambda name, question, number: (
            number % 12 < 12 * share[question.task] if name == "adacad" else question.task == ALIKE or number % 2
        )
    )


def test_context_is_shown_if_a_contrast_overrides_memory_at_no_cost():
    assert shown(CONTEXT, weighs(against=1.0))


@pytest.mark.parametrize("absent", [weighs(against=0.5), weighs(against=1.0, alike=0.5), weighs(against=0.0)])
def test_context_is_not_shown_without_a_gain_or_with_a_cost_on_agreeing_passages(absent):
    assert not shown(CONTEXT, absent)


def test_passages_and_memory_disagree_in_one_half_and_agree_in_the_other():
    for question in CONTEXT.questions:
        assert question.answer in question.context and (question.meta["memory"] == question.answer) == (
            question.task == ALIKE
        )


# --- eviction ---

EVICTION = eviction(count=12)


def forgets(least: int, kept: bool = True) -> Making:
    """Evicting caches are right from a budget on; the quantised one at the given setting."""
    return scored(
        lambda name, question, number: kept if name == KEPT else name == PLAIN or int(name.split(", ")[1]) >= least
    )


def test_eviction_is_shown_if_small_budgets_lose_the_needle_and_large_ones_do_not():
    assert shown(EVICTION, forgets(least=64))
    assert (
        EVICTION.judge(answers(EVICTION, forgets(least=64))).numbers["h2o, smallest budget that loses at most 0.05"]
        == 64
    )


@pytest.mark.parametrize("absent", [forgets(least=0), forgets(least=1000), forgets(least=64, kept=False)])
def test_eviction_is_not_shown_if_none_or_all_is_lost_or_the_control_loses_too(absent):
    assert not shown(EVICTION, absent)


def test_entrants_hold_their_budget():
    held = {
        entrant.name: assemble(entrant.config).cache_policy.budget(0)
        for entrant in EVICTION.entrants
        if entrant.name not in (PLAIN, KEPT)
    }
    assert all(name.endswith(f", {budget}") for name, budget in held.items()) and set(held.values()) == set(BUDGETS)
    assert all(re.fullmatch(r"\d{4}", question.answer) for question in EVICTION.questions)


# --- grammar ---

GRAMMAR = grammar(count=12)


def binds(valid: float = 1.0, free: float = 0.0, right: float = 1.0) -> Making:
    """Share of valid records under the schema and, at temperature 1, without it; share of right ones under the schema,
    all without.
    """
    def make(name: str, question: Question, number: int) -> dict:
        share = {BOUND: valid, BOUND_DRAWN: valid, DRAWN: free}.get(name, 1.0)
        return {
            "text": question.answer if number < 12 * share else "{}",
            "score": float(name not in (BOUND, BOUND_DRAWN) or number < 12 * right),
        }

    return make


def test_grammar_is_shown_if_all_records_are_valid_and_scores_stay():
    assert shown(GRAMMAR, binds())


@pytest.mark.parametrize("absent", [binds(valid=0.9), binds(free=1.0), binds(right=0.5)])
def test_grammar_is_not_shown_with_an_invalid_record_without_a_gain_or_with_lower_scores(absent):
    assert not shown(GRAMMAR, absent)


def test_each_record_is_constrained_by_its_own_schema():
    bound = next(entrant for entrant in GRAMMAR.entrants if entrant.name == BOUND)
    sources = [dict(bound.config_for(question).extras)["json_schema"]["source"] for question in GRAMMAR.questions]
    assert [json.loads(source) for source in sources] == [question.meta["schema"] for question in GRAMMAR.questions]
    assert bound.config.extras == []


@pytest.mark.slow
def test_a_record_fits_its_schema_as_a_validator_says():
    rng, odd = random.Random(1), [None, True, 1, 1.5, "x", [], {}, ["x"], [1], {"name": "x"}]
    for item in (records.generate(rng, True) for _ in range(60)):
        schema, found = item.meta["schema"], json.loads(item.answer)
        for key in [None, *found]:
            for value in odd:
                changed = found if key is None else found | {key: value}
                assert fits(changed, schema) == jsonschema.Draft202012Validator(schema).is_valid(changed)
    assert not is_valid("{", schema) and not is_valid("[" + item.answer + "]", schema)


# --- speculation ---

SPECULATION = speculation(count=2)


def speeds(drafted: float = 3.0, looked_up: float = 5.0, same: bool = True) -> Making:
    """The speed-up of each drafter, and whether it writes what the plain lane writes."""
    faster = {PLAIN: 1.0, DRAFTED: drafted, LOOKED_UP: looked_up}
    return lambda name, question, number: {
        "seconds": 1 / faster[name],
        "token_ids": [1] if same or name == PLAIN else [2],
    }


def test_speculation_is_shown_if_it_reaches_its_aims_with_the_same_text():
    assert shown(SPECULATION, speeds(), repeats=3)


@pytest.mark.parametrize("absent", [speeds(drafted=2.0), speeds(looked_up=3.0), speeds(same=False)])
def test_speculation_is_not_shown_if_it_is_slow_or_changes_the_text(absent):
    assert not shown(SPECULATION, absent, repeats=3)


def test_times_are_compared_after_a_warm_up_and_over_rounds():
    assert SPECULATION.timed and {question.task for question in SPECULATION.questions} == set(AIMS)


# --- votes ---

VOTES = votes(count=24)


def polls(gained: int, lost: int = 0) -> Making:
    """Greedy solves the second half; eight votes at 0.7 solve this many more and lose this many."""
    return scored(
        lambda name, question, number: (
            number < gained or number >= 12 + lost if name == polled(8, 0.7) else number >= 12
        )
    )


def test_votes_are_shown_if_a_setting_solves_significantly_more():
    assert shown(VOTES, polls(gained=10))


@pytest.mark.parametrize(
    "absent", [polls(gained=0), polls(gained=6), polls(gained=10, lost=8), polls(gained=0, lost=12)]
)
def test_votes_are_not_shown_for_a_gain_within_multiple_testing(absent):
    assert not shown(VOTES, absent)


def test_problems_are_of_the_middle_grade_and_not_drills():
    assert {question.meta["kind"] for question in VOTES.questions} == {"grade 3"}


# --- all effects ---

@pytest.mark.parametrize("name", EFFECTS)
def test_an_effect_with_a_failed_answer_is_not_shown(name):
    effect = EFFECTS[name](count=2)
    finding = EffectResult.of(effect, answers(effect, lambda *_: {"failure": "It broke."}))
    assert (
        not finding.shown and "It broke." in finding.lines()[-1] and finding.to_json()["failed"] == len(finding.answers)
    )


@pytest.mark.parametrize("name", EFFECTS)
def test_every_entrant_can_be_set_up(name):
    effect = EFFECTS[name](count=2)
    assert (
        len({entrant.name for entrant in effect.entrants}) == len(effect.entrants) and effect.entrants[0].name == PLAIN
    )
    for entrant in effect.entrants:
        assemble(entrant.config_for(effect.questions[0]))


@pytest.mark.parametrize("name", EFFECTS)
def test_a_chart_names_all_its_series(name):
    effect = EFFECTS[name](count=4)
    right = scored(lambda entrant, question, number: (number + len(entrant)) % 2 == 0)
    chart = effect.draw(answers(effect, lambda *about: right(*about) | {"text": "{}", "wrote": {"target": 1}}))
    words = [element.text for element in ElementTree.fromstring(chart.svg()).iter(f"{SVG}text")]
    assert {chart.title, *chart.places, *chart.series, *chart.levels} <= set(words)


def test_a_chart_has_a_mark_for_each_value_and_none_for_what_is_missing():
    lines = Chart(
        "<Needle> & more",
        "budget",
        "score",
        ["8", "16", "32"],
        {"a": [(0.5, 0.1), None, (1.0, 0.0)], "b": [(0.0, 0.0)] * 3},
        {"full": 1.0},
    )
    drawn = ElementTree.fromstring(lines.svg())
    heights = [float(circle.get("cy")) for circle in drawn.iter(f"{SVG}circle")]
    assert len(heights) == 5 and heights[0] == pytest.approx((heights[1] + heights[2]) / 2) and heights[1] < heights[2]
    bars = ElementTree.fromstring(
        Chart("Bars", "", "times", ["x"], {"a": [(2.0, 0.0)], "b": [(1.0, 0.0)]}, bars=True).svg()
    )
    _, tall, short = (float(box.get("height")) for box in bars.iter(f"{SVG}rect"))
    assert tall == pytest.approx(2 * short)


@pytest.mark.parametrize(
    "value, said",
    [
        (Paired(0.125, 0.05, 3, 1, 0.625), "+0.125 ± 0.050 (3 better, 1 worse, p 0.625)"),
        (Score(0.5, None, 1), "0.500 on 1 questions"),
        (None, "-"),
        (64, "64"),
        (0.25, "0.250"),
    ],
)
def test_numbers_are_printed_with_their_uncertainty(value, said):
    assert say(value) == said


def test_page_and_json_report_the_results():
    effect = votes(count=24)
    found = [EffectResult.of(effect, answers(effect, polls(gained=gained))) for gained in (10, 0)]
    facts = {"settings": {"model": "toy"}, "machine": {"cores": 2}}
    exported, written = json.loads(json.dumps(document(facts, found), allow_nan=False)), page(facts, found, "effects")
    assert [each["shown"] for each in exported["effects"]] == [True, False] and exported["effects"][0]["numbers"][
        "8 votes at 0.7 against greedy"
    ]["better"] == 10
    assert (
        "## Votes: shown" in written
        and "## Votes: not shown" in written
        and "effects/votes.svg" in written
        and effect.rule in written
    )


@pytest.mark.slow
def test_the_command_writes_its_results(tmp_path, capsys):
    code = main(
        [
            "bench",
            "effects",
            "--only",
            "context",
            "--questions",
            "2",
            "--out",
            str(tmp_path / "e.json"),
            "--page",
            str(tmp_path / "e.md"),
        ]
    )
    exported, printed = json.loads((tmp_path / "e.json").read_text()), capsys.readouterr().out
    assert code == 0 and printed.startswith("context: ") and not any(effect["failed"] for effect in exported["effects"])
    picture = re.search(r"!\[.*\]\((.*\.svg)\)", (tmp_path / "e.md").read_text()).group(1)
    assert ElementTree.parse(tmp_path / picture).getroot().tag == f"{SVG}svg"
    assert {row["entrant"] for row in exported["effects"][0]["table"]} == {PLAIN, "memory alone", *CONTRASTS}


def test_an_unknown_effect_is_refused(capsys):
    assert main(["bench", "effects", "--only", "magic"]) == 2
    assert "no effect 'magic'" in capsys.readouterr().err
