"""SmartSpec on this machine: draft lengths by measured forwards. The rule is in test_strategies_stopping.py."""
from __future__ import annotations

from playground.contract.lane_config import LaneConfig
from playground.decoding.forward_times import forward_times
from playground.events import Draft, Note
from support.speculative_runs import of, recorded

BRIEF = {"smartspec": {"costs": "simulated"}}  # the same on every machine
MEASURING = LaneConfig("smartspec", {}, [("draft_model", {"depth": 5})])
FORWARDS = {(rows, context): 2e-3 + 1e-4 * rows + 1e-6 * context for rows in (1, 4, 16) for context in (32, 256)}


def measured(monkeypatch, draft: float) -> tuple[list[int], list[str]]:
    """Lengths of the drafts, and notes, where a draft forward takes `draft` times as long as a target forward."""
    factors = iter([1.0, draft])

    def times(model):
        factor = next(factors)
        return {size: factor * seconds for size, seconds in FORWARDS.items()}

    monkeypatch.setattr("playground.decoding.lane.lm.forward_times", times)
    _, events = recorded(MEASURING, length=20)
    return [len(draft.tokens) for draft in of(Draft, events)], [note.text for note in of(Note, events)]


def test_the_draft_length_follows_from_what_forwards_take_on_this_machine(monkeypatch):
    fast, notes = measured(monkeypatch, 0.01)
    slow, _ = measured(monkeypatch, 5.0)
    assert max(fast) > 1 and not slow
    assert "takes 2 ms, 0.1 ms for each input token and 0.001 ms for each token of context" in notes[0]


def test_the_times_are_those_of_forwards_and_are_measured_once():
    lane = recorded(MEASURING, length=4)[0]._runners[0].lane
    times = lane.target_model.forward_times
    assert all(seconds > 0 for seconds in times.values()) and len(times) >= 3
    assert forward_times(lane.target_model) is times
