"""What is written twice, in Python and in the page's scripts, says the same: metrics of a run, rules of a lane."""
from __future__ import annotations

from dataclasses import asdict
from itertools import product

import pytest
from pairs import pair
from registry import registered

from playground.contract import find
from playground.contract.lane_config import MAIN_KINDS, LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Commit, Done
from playground.trace import Trace
from playground.trace.lane_metrics import metrics
from support.live_runs import RUN
from support.metric_table import TABLE
from support.page_scripts import browser, rule_scripts, run_scripts  # noqa: F401

pytestmark = pytest.mark.journey  # in seconds, and no page could be trusted where these fail
MEASURED = """([document, lengths]) => {
  const trace = new Trace();
  trace.take({ run: "a run", n: 0, headers: document.lanes, events: document.events, state: "done", recorded: true });
  const state = new LaneState(trace.lanes[0]);
  return lengths.map((length) => {
    state.goTo(length);
    return state.shown === state.sequence(0) ? measure(state) : null;
  });
}"""
LANES = (
    LaneConfig("sample"), LaneConfig("beam_search"), LaneConfig("ead"), LaneConfig("layer_skip"),
    LaneConfig("speculative", {}, [("draft_model", {"width": 2}), ("sample_match", {}), ("temperature", {})]),
    LaneConfig("speculative", {}, [("lookahead", {})]),
    LaneConfig("greedy", {}, [("regex", {"pattern": "[a-z ]{4}!!"})]),
    LaneConfig("greedy", {}, [("sink_window", {"sinks": 1, "window": 4})]),
)


def by_the_page(run_scripts, trace: Trace, lengths: list[int]) -> list[dict | None]:  # noqa: F811
    """All metrics of the page after so many events; None where it shows another branch than the text."""
    return run_scripts(MEASURED, [trace.to_json(), lengths])


def agree(shown: dict, computed: dict) -> None:
    names = shown.keys() & computed.keys()
    assert len(names) == 14
    assert {name: shown[name] for name in names} == pytest.approx({name: computed[name] for name in names})


@pytest.mark.parametrize("trace, expected", TABLE.values(), ids=TABLE)
def test_a_metric_of_the_table_is_the_same_on_the_page(run_scripts, trace, expected):  # noqa: F811
    (shown,) = by_the_page(run_scripts, trace, [len(trace.lane(0).events)])
    assert {name: shown[name] for name in expected if name in shown} == {
        name: value for name, value in expected.items() if name in shown
    }
    agree(shown, metrics(trace))


@pytest.mark.slow
def test_every_metric_agrees_after_every_commit_of_runs_of_all_kinds(run_scripts):  # noqa: F811
    sessions = [prepare(pair(), [lane], Prompt("The red fox"), Limits(0, 6)) for lane in LANES]
    for session in sessions:
        list(session)
    for trace in [*(session.trace for session in sessions), RUN.lane(0), RUN.lane(1)]:
        # rows of an open round count as wasted only once it is committed
        lengths = [i for i, stamped in enumerate(trace.events, 1) if isinstance(stamped.event, Commit | Done)]
        found = [*zip(lengths, by_the_page(run_scripts, trace, lengths))]
        assert found[-1][1], trace.headers[0].title
        for length, shown in found:
            if shown is not None:
                agree(shown, metrics(Trace(trace.headers, trace.events[:length])))


# --- rules of a lane ---

def accepted(config: LaneConfig) -> bool:
    try:
        assemble(config)
    except Refusal:
        return False
    return True


def kind_of(name: str) -> str:
    return find(name).kind


def with_slots() -> list[str]:
    return [cls.name for cls in registered(*MAIN_KINDS) if {"drafter", "verifier"} <= set(cls.slots().values())]


def test_the_editor_bars_a_drafter_a_verifier_or_a_sampler_exactly_where_a_run_is_refused(rule_scripts):  # noqa: F811
    drafters, verifiers = ([cls.name for cls in registered(kind)] for kind in ("drafter", "verifier"))
    samplers = [[], ["temperature"], ["repetition_penalty"]]  # one that draws, and one that does not
    lanes = [(main, extras) for main in with_slots() for extras in product(drafters, verifiers, samplers)]
    assert len(lanes) > 1000
    given = [{"strategy": main, "extras": [[name, {}] for name in (drafter, verifier, *added)]}
             for main, (drafter, verifier, added) in lanes]
    barred = rule_scripts("""lanes => lanes.map((lane) => {
      const main = byName.get(lane.strategy);
      const taken = main.slots.every((slot) => slot.takes.includes(filling(lane, slot)[0]));
      return !taken || Boolean(objection(partIn(lane, main, "verifier"), lane, main).reason);
    })""", given)
    ours = [not accepted(LaneConfig(lane["strategy"], {}, lane["extras"])) for lane in given]
    assert [lane for lane, page, run in zip(given, barred, ours) if page != run] == []
    assert True in barred and False in barred


def test_the_editor_offers_every_second_toggle_that_a_run_accepts(rule_scripts):  # noqa: F811
    toggles = [cls.name for cls in registered("sampler", "constraint", "cache_policy", "compute_policy", "overlay")]
    pairs = [*product(toggles[::7], toggles)]
    offered = rule_scripts("""pairs => pairs.map(([held, name]) =>
      fits(byName.get("greedy"), byName.get(held), { extras: [] }) &&
      fits(byName.get("greedy"), byName.get(name), { extras: [[held, {}]] }))""", pairs)
    run = [accepted(LaneConfig("greedy", {}, [(name, {}) for name in pair])) for pair in pairs]
    assert [pair for pair, page, accepts in zip(pairs, offered, run) if accepts and not page] == []
    more = [pair for pair, page, accepts in zip(pairs, offered, run) if page and not accepts]
    # the server explains in the card why a policy that leaves layers out does not go with one that needs them all
    assert {frozenset(map(kind_of, pair)) for pair in more} <= {frozenset(("compute_policy", "cache_policy"))}


def test_a_changed_strategy_keeps_the_parts_it_takes_and_gets_an_exact_verifier(rule_scripts):  # noqa: F811
    extras = [[name, {}] for name in ("draft_model", "greedy_match", "temperature", "regex")]
    lanes = [{"strategy": cls.name, "extras": extras} for cls in registered(*MAIN_KINDS)]
    settled = rule_scripts("lanes => lanes.map((lane) => { settle(lane); return lane; })", lanes)
    assert [lane for lane in settled if not accepted(LaneConfig(lane["strategy"], {}, lane["extras"]))] == []
