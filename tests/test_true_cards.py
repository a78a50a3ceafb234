"""What the page says of a token is what its verifier did, under every verifier: nothing was drawn where nothing was."""
from __future__ import annotations

import csv
import io
import re
from typing import NamedTuple

import pytest
from pairs import pair_for
from registry import registered

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Draft, Verdict
from playground.player import live_view_assets
from playground.trace import Trace
from playground.trace.csv_export import to_csv
from support.page_scripts import Evaluate, browser, defining, evaluating  # noqa: F401

pytestmark = pytest.mark.journey  # the card teaches: one untrue word, and it teaches something wrong
VERIFIERS = [cls.name for cls in registered("verifier")]
JUDGES = LaneConfig("bild", {"fallback": 0.0}), LaneConfig("reflective"), LaneConfig("pearl")  # with rules of their own
SAMPLED = ("temperature", {"t": 1.0})
DRAWN = re.compile(r"sampled|drew|rejected|residual|(?<![\d.])0\.000(?!\d)|draw ", re.IGNORECASE)

SAID = """([run, lane]) => {
  const trace = new Trace();
  trace.take({ run: "a run", n: 0, headers: run.lanes, events: run.events, state: "done", recorded: true });
  const record = trace.lanes[lane];
  const state = new LaneState(record);
  state.goTo(record.events.length);
  const acts = { refusal: () => "", lookRefusal: () => "", rivals: () => 10, isBrief: () => false, holds: () => false };
  const root = Object.assign(window.document.createElement("div"), { innerHTML: "<div class='card'></div>" });
  const card = new Card(root, acts);
  return state.shown.tokens.map((token, at) => {
    const app = { selection: { heldOf: () => at } };
    const parts = card.rest(lane, state, token).map((part) => part.textContent);
    return { origin: token.origin, card: parts.join("\\n"), moment: sayMoment({ state, record }, app) };
  });
}"""


class Said(NamedTuple):
    """What the page says of each token of a run's text, and what happened in it."""

    tokens: list[dict]
    trace: Trace

    def of(self, origin: str) -> list[str]:
        return [f"{said['moment']}\n{said['card']}" for said in self.tokens if said["origin"] == origin]

    @property
    def verdicts(self) -> list[Verdict]:
        return [stamped.event for stamped in self.trace.events if isinstance(stamped.event, Verdict)]


@pytest.fixture(scope="module")
def card_scripts(browser) -> Evaluate:  # noqa: F811
    modules = ("run/trace.js", "run/model.js", "lane/card.js", "views/choice.js")
    return evaluating(browser, defining(*modules, constants=live_view_assets.constants()))


@pytest.fixture
def said(card_scripts):
    """Runs a lane and reads what the page says of its tokens."""
    def run(config: LaneConfig, length: int = 40) -> Said:
        session = prepare(pair_for(config), [config], Prompt("The green bird"), Limits(3, length))
        for _ in session:
            pass
        return Said(card_scripts(SAID, [session.trace.to_json(), 0]), session.trace)
    return run


def verified(verifier: str, *samplers: tuple[str, dict]) -> LaneConfig:
    return LaneConfig("speculative", {}, [("draft_model", {"depth": 3, "width": 2}), (verifier, {}), *samplers])


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_greedy_lane_speaks_of_no_draw_whatever_verifies_it(said, verifier):
    found = said(verified(verifier))
    replaced = found.of("redraw")
    assert replaced and all(re.search(r"The target chose .+; the draft said ", one) for one in replaced)
    assert all("It is the target's own choice" in one for one in found.of("draft"))
    assert [one for said in found.tokens for one in said.values() if DRAWN.search(one)] == []
    assert all(test.draw is None for verdict in found.verdicts for test in verdict.tests)
    rows = csv.DictReader(io.StringIO(to_csv(found.trace)))
    assert {row["origin"] for row in rows} == {"draft", "replaced", "bonus"}


@pytest.mark.parametrize("config", JUDGES, ids=lambda config: config.strategy)
def test_a_greedy_lane_with_a_rule_of_its_own_speaks_of_no_draw_either(said, config):
    found = said(config)
    assert any(isinstance(stamped.event, Draft) for stamped in found.trace.events)
    assert [one for one in found.of("redraw") if DRAWN.search(one)] == []


@pytest.mark.parametrize("verifier", [name for name in VERIFIERS if name != "greedy_match"])
def test_a_lane_that_samples_says_what_was_drawn_and_by_which_numbers(said, verifier):
    found = said(verified(verifier, SAMPLED), length=60)
    replaced = found.of("redraw")
    by_numbers = any(test.draw is not None for verdict in found.verdicts for test in verdict.tests)
    words = "Resampled because the target rejected:" if by_numbers else "The target sampled "
    assert replaced and all(words in one for one in replaced)
    for verdict in found.verdicts:
        for test in verdict.tests:
            chance = min(1.0, test.p / test.q) if test.chance is None else test.chance
            assert test.draw is None or test.kept == (test.draw < chance)


def test_a_draft_token_of_a_lookup_has_no_probability_of_a_drafter(said):
    config = LaneConfig("speculative", {}, [("prompt_lookup", {}), ("greedy_match", {})])
    drafted = said(config, length=120).of("draft")
    assert drafted and not any("q = " in one for one in drafted)


def test_given_tokens_of_a_fork_are_not_said_to_be_the_grammars(said):
    given = said(LaneConfig("greedy", forced=[70, 71, 72], forked_at=2)).of("forced")
    assert len(given) == 3 and all("was given: the text begins with it." in one for one in given)
    assert not any("grammar" in one for one in given)
