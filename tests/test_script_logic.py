"""Logic of the page that needs no page: the rules of the guessing game, and the interesting places of a run.

What Python computes, too, is in test_page_logic.py.
"""
from __future__ import annotations

import math
from itertools import pairwise

import pytest

from playground.events import Cache, Candidate, Done, Figure, Mask, Step, Switch
from playground.player import live_view_assets
from playground.trace import Trace
from playground.ui.play import lane_editor
from support.page_scripts import Evaluate, browser, defining, evaluating  # noqa: F401
from support.traces import commit, draft, trace, verdict

pytestmark = pytest.mark.journey  # in seconds, and no page could be trusted where these fail
ODDS = (0.4, 0.3, 0.2, 0.06, 0.04)
ELSE = None  # the id of "something else"


# --- the guessing game ---

@pytest.fixture(scope="module")
def game(browser) -> Evaluate:  # noqa: F811
    return evaluating(browser, defining("game/rules.js"))


def frame(*entropies: float, came: int = 0, over: bool = True, seed: int = 3) -> dict:
    """A text whose tokens have these entropies, in bits, each among five candidates of which one came."""
    top = [{"id": i, "piece": f" {i}", "p": p} for i, p in enumerate(ODDS)]
    tokens = [{"id": came, "piece": f" {came}", "p": ODDS[came], "entropy": one, "top": top} for one in entropies]
    return {"game": "one", "seed": seed, "over": over, "lanes": "", "opening": [], "asked": False, "ids": [],
            "tokens": tokens}


def options(game: Evaluate, count: int, **how) -> list[dict]:
    """What is offered in the first round."""
    return game("""([frame, count]) => {
      const match = new Match(frame);
      match.next(-1, count, 1);
      return match.round.options;
    }""", [frame(2.0, **how), count])


@pytest.mark.parametrize("count", [4, 5, 6])
def test_a_round_offers_the_likeliest_tokens_and_the_rest_of_the_probability_as_something_else(game, count):
    *likeliest, other = options(game, count)
    assert sorted(one["id"] for one in likeliest) == [*range(count - 1)]
    assert other["id"] is ELSE and other["p"] == pytest.approx(1 - sum(ODDS[:count - 1]))


def test_the_order_of_options_is_the_same_for_a_seed_and_does_not_follow_their_probabilities(game):
    orders = [[one["id"] for one in options(game, 6, seed=seed)] for seed in range(20)]
    assert orders == [[one["id"] for one in options(game, 6, seed=seed)] for seed in range(20)]
    assert {order[0] for order in orders} == {*range(5)} and all(order[-1] is ELSE for order in orders)


def test_tokens_at_or_below_the_bound_are_skipped_and_a_text_that_grows_is_waited_for(game):
    played = game("""([frame, more]) => {
      const match = new Match(frame), seen = [];
      for (let i = 0; i < 4; i++) {
        match.next(1, 4, 1);
        seen.push([match.round?.position ?? null, match.waits, match.isFinished]);
        if (i === 2) match.take(more);
      }
      return seen;
    }""", [frame(0.2, 1.5, 1.0, 2.0, over=False), frame(0.2, 1.5, 1.0, 2.0, 0.5, 3.0)])
    assert played == [[1, False, False], [3, False, False], [None, True, False], [5, False, False]]


def scores(game: Evaluate, came: int, picks: list[int | None], count: int = 4) -> list[dict]:
    """The table after one round in which teams chose the options with these ids."""
    return game("""([frame, picks, count]) => {
      const match = new Match(frame);
      match.next(-1, count, picks.length);
      match.round.picks = picks.map((wanted) => match.round.options.find(({ id }) => id === wanted));
      match.open();
      return match.scores(picks.map(String));
    }""", [frame(1.75, came=came), picks, count])


def test_every_team_pays_for_its_own_pick_beside_the_model_and_a_uniform_guess(game):
    table = scores(game, came=0, picks=[0, 2, ELSE])
    offered = [*ODDS[:3], 1 - sum(ODDS[:3])]
    costs = [-math.log2(p) for p in (ODDS[0], ODDS[2], offered[-1])]
    blind = sum(-math.log2(p) for p in offered) / 4
    assert [row["total"] for row in table] == pytest.approx([*costs, 1.75, blind])
    assert [row["right"] for row in table[:3]] == [1, 0, 0]


def test_something_else_is_right_exactly_if_the_token_was_not_offered(game):
    assert [row["right"] for row in scores(game, came=4, picks=[ELSE, 0])[:2]] == [1, 0]
    assert [row["right"] for row in scores(game, came=4, picks=[ELSE, 4], count=6)[:2]] == [0, 1]


def test_a_typed_token_that_is_offered_is_the_offered_option(game):
    found = game("""(frame) => {
      const match = new Match(frame);
      match.next(-1, 4, 1);
      const [known, other] = [{ id: 1, p: 0.3 }, { id: 9, p: 0.001 }].map((one) => match.round.typedOption(one));
      return [match.round.options.includes(known), match.round.all.length, match.round.isRight(other)];
    }""", frame(2.0))
    assert found == [True, 5, False]


# --- interesting places ---

@pytest.fixture(scope="module")
def run(browser) -> Evaluate:  # noqa: F811
    modules = ("run/trace.js", "run/places.js")
    return evaluating(browser, defining(*modules, constants=live_view_assets.constants()))


def places(run: Evaluate, text: Trace, by: int = 1) -> list[dict]:
    """All places of a run in the order in which they are visited from its beginning."""
    return run("""([document, by]) => {
      const trace = new Trace();
      const { lanes: headers, events } = document;
      trace.take({ run: "a run", n: 0, headers, events, state: "done", recorded: true });
      const places = new Places(trace), found = [];
      let cursors = trace.lanes.map(() => 0);
      for (let place = places.next(cursors, by); place && found.length < place.of; place = places.next(cursors, by)) {
        found.push(place);
        cursors = cursors.map((at, lane) => (lane === place.lane ? place.event + 1 : at));
      }
      return found;
    }""", [text.to_json(), by])


def step(position: int, entropy: float) -> Step:
    return Step(position, entropy, entropy, 1, [Candidate(1, " 1", 1.0, 1.0)])


RUN = trace(
    step(0, 0.5), commit(0, [1]),
    step(1, 2.5), Mask(1, 7, 100, 0.9, [Candidate(3, " no", 0.9, 0.0)]), commit(1, [2]),
    draft(0, [3, 4], [-1, -1]), verdict(0, [1], 5, tests=[0, 1]), commit(2, [4, 5], ["draft", "bonus"]),
    draft(1, [6, 7]), verdict(1, [0], 8, tests=[0, 1], origin="redraw"), commit(4, [6, 8], ["draft", "redraw"]),
    Cache("target", 9, 1, 1, [[[(0, 4)]]], 0, 2), Cache("target", 9, 1, 1, [[[(0, 4)]]], 0, 1),
    Switch(6, to="large", why="uncertain"), step(6, 1.0), commit(6, [9]), Done("length"),
)


def test_the_places_of_a_run_come_in_the_order_of_time_each_with_its_token(run):
    assert [(place["position"], place["says"]) for place in places(run, RUN)] == [
        (1, "the mask removed 90 % of the probability, among it “ no”"),
        (1, "the largest entropy of this lane, 2.50 nats"),
        (2, "a side branch of the draft tree was accepted, “ 4”"),
        (5, "the target rejected “ 7” and continued with “ 8”"),
        (5, "the cache starts to evict: 2 slots freed"),
        (6, "switch to large: uncertain"),
    ]


def test_places_are_numbered_and_visited_in_a_circle_both_ways(run):
    ahead, back = places(run, RUN), places(run, RUN, by=-1)
    assert [place["number"] for place in ahead] == [1, 2, 3, 4, 5, 6]
    assert [place["number"] for place in back] == [6, 5, 4, 3, 2, 1]
    assert all(one["at"] <= other["at"] for one, other in pairwise(ahead))


def test_a_run_without_anything_special_has_the_place_of_its_largest_entropy_only(run):
    assert [place["position"] for place in places(run, trace(step(0, 0.1), commit(0, [1]), Done("end")))] == [0]
    assert places(run, trace(commit(0, [1]), Done("end"))) == []


def test_a_percentage_has_two_digits_however_it_is_rounded(browser):  # noqa: F811
    percent = evaluating(browser, defining("components/numbers.js"))
    assert percent("values => values.map(percent)", [0.0999999, 0.0994, 0.1, 0.9951, 1, 0.0004]) == [
        "10 %", "9.9 %", "10 %", "99.5 %", "100 %", "<0.1 %"]


# --- candidates of a token ---

@pytest.fixture(scope="module")
def candidates(browser) -> Evaluate:  # noqa: F811
    return evaluating(browser, defining("run/candidates.js"))


SPECIALS = [[0, " a", 0.4], [1, "<|user|>", 0.2], [2, "<|end|>", 0.1], [3, "<|assistant|>", 0.08], [4, " b", 0.06],
            [5, " c", 0.04], [6, "<|tool|>", 0.02]]


@pytest.mark.parametrize("chosen, most, with_specials, shown, left_out, others", [
    (0, 3, False, [0, 2, 4], (2, 0.28), 0.16),  # the tool is not among the first: one of the others
    (0, 3, True, [0, 1, 2], (0, 0), 0.3),
    (1, 2, False, [0, 1], (0, 0), 0.4),  # it was chosen
    (5, 2, False, [0, 2, 5], (1, 0.2), 0.26),  # at any rank
    (0, 9, False, [0, 2, 4, 5], (3, 0.3), 0.1),
])
def test_special_candidates_are_left_out_until_asked_for_and_no_probability_vanishes(
    candidates, chosen, most, with_specials, shown, left_out, others
):
    found = candidates("([step, ...how]) => leading(step, ...how)",
                       [{"top": SPECIALS, "chosen": chosen}, most, with_specials])
    assert [candidate[0] for candidate in found["shown"]] == shown
    assert (found["specials"]["count"], found["specials"]["raw"]) == (left_out[0], pytest.approx(left_out[1]))
    assert found["others"] == pytest.approx(others)
    said = candidates("found => saySpecials(found.specials)", found)
    number, raw = left_out
    percent = f"{round(100 * raw)} %"
    assert said == ("" if not number else f"{number} special token{'s' if number > 1 else ''} {percent}")


# --- weights of a lane ---

@pytest.mark.parametrize("text, parts", [
    ("", ("", None, "")),
    ("int8", ("int8", None, "")),
    ("rtn:bits=4", ("", None, "rtn:bits=4")),
    ("int8 + adapter:a + b + rtn:bits=4 + wanda", ("int8", "a + b", "rtn:bits=4 + wanda")),
    ("adapter:some/folder", ("", "some/folder", "")),
    ("{{nonsense", ("", None, "{{nonsense")),
    ("nf4 + rtm:bits=4", ("nf4", None, "rtm:bits=4")),
])
def test_no_part_of_the_weights_of_a_lane_is_dropped_because_it_is_not_known(browser, text, parts):  # noqa: F811
    weights = evaluating(browser, defining("editor/weights.js", constants=lane_editor.constants()))
    found = weights("text => [partsOf(text), textOf(partsOf(text)), phraseOf(text)]", text)
    assert found[0] == dict(zip(("packed", "adapter", "changes"), parts))
    assert found[1] == text and bool(found[2]) == bool(text)


# --- parts that are switched ---

OVERLAID = trace(
    commit(0, [1, 2]),
    Figure("spans", "features", {"spans": [[0, 1, "two", 0.5], [1, 2, "none", 0.0]], "shades": True,
                                 "parts": [["feature 7", "feature 3"], []]}),
    Figure("spans", "neurons", {"spans": [[0, 1, "one", 0.5]], "shades": True, "parts": [["neuron 1.2"]]}),
    Figure("spans", "watermark", {"spans": [[0, 1, "green", 1.0]], "shades": True}), Done("end"),
)


def test_parts_that_overlays_name_at_a_token_are_those_of_all_of_them_each_once(browser):  # noqa: F811
    modules = ("run/trace.js", "run/model.js", "lane/card.js")
    evaluate = evaluating(browser, defining(*modules, constants=live_view_assets.constants()))
    found = evaluate("""({ lanes: headers, events }) => {
      const trace = new Trace();
      trace.take({ run: "a run", n: 0, headers, events, state: "done", recorded: true });
      const state = new LaneState(trace.lanes[0]);
      state.goTo(events.length);
      const at = (position, sequence = 0) => partsNamed(state, { position, sequence });
      return [at(0), at(1), at(2), at(0, 1)];
    }""", OVERLAID.to_json())
    assert found == [["feature 7", "feature 3", "neuron 1.2"], [], [], []]


def test_a_lane_that_switches_parts_is_named_by_them(browser):  # noqa: F811
    names = evaluating(browser, defining("run/lane_names.js"))
    lane = {"title": "Greedy", "own": ["seed 0"]}
    switch = {"name": "switch_part", "title": "A part off or on", "kind": "compute_policy"}
    knobs = [{"parts": "feature 17", "state": "off"}, {"parts": "feature 17", "state": "on"}, {"parts": ""}]
    lanes = [lane | {"parts": [switch | {"knobs": each}]} for each in knobs] + [lane | {"parts": []}]
    assert [each["short"] for each in names("""lanes => namesOf(lanes.map(({ parts, ...lane }) =>
      ({ ...lane, parts: parts.map(namedPart) })))""", lanes)] == [
        "Feature 17 off", "Feature 17 on", "A part off or on", "Greedy"]


# --- where two lanes part ---

@pytest.fixture(scope="module")
def parting(browser) -> Evaluate:  # noqa: F811
    return evaluating(browser, defining("lane/parting.js"))


def row(**shares: float) -> dict:
    """The recorded candidates of a step: letters stand for tokens."""
    return {"top": [[ord(letter), letter, share, share] for letter, share in shares.items()]}


def test_candidates_of_both_rows_stand_side_by_side_and_the_likelier_in_either_come_first(parting):
    rows = [row(a=0.5, b=0.2, c=0.1), row(d=0.6, a=0.2, b=0.15)]
    found = parting("([steps, taken]) => otherCandidates(steps, taken, 9)", [rows, [ord("a")]])
    assert found == [{"piece": "d", "shares": [None, 0.6]}, {"piece": "b", "shares": [0.2, 0.15]},
                     {"piece": "c", "shares": [0.1, None]}]
    assert len(parting("([steps, taken]) => otherCandidates(steps, taken, 2)", [rows, []])) == 2


def test_a_lane_that_recorded_nothing_there_has_no_share(parting):
    assert parting("(steps) => otherCandidates(steps, [], 9)", [row(a=1.0), None]) == [
        {"piece": "a", "shares": [1.0, None]}]


def test_what_is_left_for_other_tokens_counts_those_that_were_not_recorded(parting):
    assert parting("(shares) => restOf(shares)", [0.5, None, 0.125]) == 0.375
    assert parting("(shares) => restOf(shares)", [0.75, 0.2500001]) == 0  # rounding in the trace


def test_a_divergence_is_one_that_an_overlay_measured_at_this_token(parting):
    measured = [{"parts": [{"x": at, "series": {"KL(loaded || lane)": nats}}]} for at, nats in ((0, 0.5), (2, 0.25))]
    asked = "([figures, position]) => measuredKL(figures, position)"
    assert [parting(asked, [measured, position]) for position in (0, 1, 2)] == [0.5, None, 0.25]
    assert parting(asked, [[{"parts": [{"series": {"loss": 1.0}}]}], 0]) is None
