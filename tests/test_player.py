"""The player's clock, tick by tick: what is on screen after so many seconds of playback. The scripts run in a browser
without a page.
"""
from __future__ import annotations

import pytest
from chromium import chromium

from playground.player.live_view_assets import constants
from support.page_scripts import defining, evaluating

pytestmark = pytest.mark.journey
LANE_OF = """const laneOf = (rate, tokens, per, over) => ({ tokens, end: tokens / rate, over,
  forwards: Array.from({ length: tokens / per }, (_, i) => (per * (i + 1)) / rate),
  events: Array.from({ length: tokens }, (_, i) => ({ kind: "commit", at: (i + 1) / rate, key: i + 1, seq: i,
    sequence: 0, forwards: Math.floor((i + 1) / per) })) });
"""
PLAY = """([seconds, rates, speed, over, perForward]) => {
  const lanes = rates.map((rate, i) => laneOf(rate, 60, perForward ? perForward[i] : 1, over));
  const trace = { lanes, over, version: 60 * lanes.length };
  const player = new Player(trace);
  if (perForward) player.setMode("forwards");
  player.setSpeed(speed);
  player.restart();
  for (let now = 0; now <= 1000 * seconds; now += 20) player.tick(now);
  return player.cursors;
}"""


@pytest.fixture(scope="module")
def play():
    """Tokens of each lane on screen after some seconds. `rates`: their tokens per second; `per_forward`: their tokens
    per forward of the target, by which they are then aligned.
    """
    with chromium() as browser:
        evaluate = evaluating(browser, defining("player/player.js", constants=constants()) + LANE_OF)
        yield lambda seconds, rates, speed, over=True, per_forward=None: evaluate(
            PLAY, [seconds, rates, speed, over, per_forward]
        )


@pytest.mark.parametrize("over", [True, False], ids=["recorded", "live"])
def test_at_reading_speed_the_slowest_lane_writes_fifteen_tokens_a_second_and_lanes_keep_their_proportions(play, over):
    slow, fast = play(2.0, [150, 300], "reading", over)
    assert abs(slow - 30) <= 1 and abs(fast - 60) <= 1


def test_at_reading_speed_a_model_that_is_slower_by_itself_is_shown_as_it_writes(play):
    assert abs(play(2.0, [10, 10], "reading")[0] - 20) <= 1
    assert play(0.1, [10, 10], "reading", False) == [60, 60], "all that has arrived of a live run"


def test_at_real_speed_a_recorded_run_takes_its_own_time_and_a_live_one_is_followed(play):
    assert abs(play(0.2, [150], "live")[0] - 30) <= 3
    assert play(0.1, [150], "live", False) == [60]


def test_a_slower_speed_is_a_share_of_the_real_one(play):
    assert abs(play(2.0, [150], "0.1")[0] - 30) <= 1


# --- aligned by forwards of the target ---

def test_aligned_by_forwards_a_lane_with_four_tokens_per_forward_writes_four_times_as_fast_however_long_it_took(play):
    plain, drafting = play(2.0, [300, 150], "reading", per_forward=[1, 4])
    assert 6 <= plain <= 9 and 4 * plain <= drafting <= 4 * (plain + 1) and drafting < 60


def test_aligned_by_forwards_real_speed_takes_the_measured_time_of_the_slowest_forward(play):
    plain, drafting = play(0.2, [300, 100], "live", per_forward=[1, 4])  # a forward of the second lane takes 40 ms
    assert abs(plain - 5) <= 1 and abs(drafting - 20) <= 4


def test_aligned_by_forwards_no_lane_of_a_live_run_is_shown_beyond_the_slowest_one(play):
    assert play(0.1, [150, 150], "live", False, per_forward=[1, 4]) == [15, 60]
