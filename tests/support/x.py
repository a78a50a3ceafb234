"""x"""
from __future__ import annotations

from playground.contract.lane_config import LaneConfig
from playground.events import Draft, Note
from strategies.speculative.smartspec import MEASURED
from support.speculative_runs import of, recorded


def smart(drafter: str = "draft_model", *samplers: tuple[str, dict], depth: int = 5, **knobs) -> LaneConfig:
    return LaneConfig("smartspec", {"costs": "simulated", **knobs}, [(drafter, {"depth": depth}), *samplers])


# --- SmartSpec: the draft length with the best goodput ---

FORWARDS = {(rows, context): 2e-3 + 1e-4 * rows + 1e-6 * context for rows in (1, 4, 16) for context in (32, 256)}


def measured(monkeypatch, draft: float) -> tuple[list[int], list[str]]:
    """Lengths of the drafts, and notes, where a draft forward takes `draft` times as long as a target forward."""
    factors = iter([1.0, draft])

    def times(model):
        factor = next(factors)
        return {size: factor * seconds for size, seconds in FORWARDS.items()}

    monkeypatch.setattr("playground.decoding.lane.lm.forward_times", times)
    _, events = recorded(smart(costs=MEASURED), length=20)
    return [len(draft.tokens) for draft in of(Draft, events)], [note.text for note in of(Note, events)]
