"""Speculative lanes run to their end, and the distance of their output distribution from the target's."""
from __future__ import annotations

from pairs import pair
from tables import TableModel, distance, law, product_law

from playground.contract import find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Figure
from support.laws import AT_ONE
from support.speculation import speculative_lane

CHAIN = speculative_lane("draft_model", "rejection", AT_ONE, depth=3)


def recorded(
    config: LaneConfig | Assembly, models: Models | None = None, length: int = 24, prompt: str = "The green bird"
):
    """A session that has run to its end, and its events."""
    session = prepare(models or pair(), [config], Prompt(prompt), Limits(0, length))
    return session, [stamped.event for stamped in session]


def of(kind: type, events: list) -> list:
    return [event for event in events if isinstance(event, kind)]


def figures(events: list, name: str) -> list[dict]:
    return [event.data for event in of(Figure, events) if name in event.name]


def with_drafter(drafter, *samplers: tuple[str, dict], verifier: str = "rejection") -> Assembly:
    """Speculation with a drafter defined by the test."""
    assembly = assemble(speculative_lane("draft_model", verifier, *samplers))
    assembly.decoder.drafter = drafter
    return assembly


def law_distance(
    lane: LaneConfig | Assembly, models: dict, length: int = 4, prompt: tuple[int, ...] = (0, 1, 0)
) -> float:
    return distance(
        law(lane, models, list(prompt), length),
        product_law(TableModel(models["target"].letters, models["target"].ends), list(prompt), length),
    )


class DropsDoubtful(find("specdec_plus_plus")):
    """Withdraws a draft token of small probability instead of proposing it."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        return tree.only(list(range(len(tree) - 1))) if len(tree) and self._should_stop(tree) else tree
