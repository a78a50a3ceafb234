"""All lanes, and runs of them that several tests look at."""
from __future__ import annotations

from collections import deque

import pytest
from pairs import pair_for
from registry import lanes, title

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session, prepare
from playground.events import Commit, Event
from support.laws import drawing

LENGTH = 8
PROMPT = "The green bird"
LANES = lanes()
ALL = {title(config): config for config in LANES + drawing(LANES)}


def each_of(named: dict[str, LaneConfig]):
    """A case for each of these lanes. They cross decoders, drafters and verifiers, so they belong to the matrix."""
    cases = pytest.mark.parametrize("config", named.values(), ids=named)
    return lambda test: pytest.mark.matrix(cases(test))


def in_groups(named: dict[str, LaneConfig], size: int = 8):
    """A case for every few of these lanes, which run side by side."""
    configs = list(named.values())
    groups = [configs[start:start + size] for start in range(0, len(configs), size)]
    cases = pytest.mark.parametrize("configs", groups, ids=lambda group: f"{title(group[0])} and {len(group) - 1} more")
    return lambda test: pytest.mark.matrix(cases(test))


def start(
    *configs: LaneConfig, models: Models | None = None, seed: int = 0, length: int = LENGTH, text: str = PROMPT
) -> Session:
    return prepare(models or pair_for(*configs), list(configs), prompt_of(text), Limits(seed, length))


def prompt_of(text: str) -> Prompt:
    return Prompt(text, context="A bird.")


def events(session: Session, lane: int = 0) -> list[Event]:
    deque(session, maxlen=0)
    return [stamped.event for stamped in session.trace.events if stamped.lane == lane]


def commits(recorded: list[Event]) -> list[Commit]:
    """The events of the lane's text; branches have numbers of their own."""
    return [event for event in recorded if isinstance(event, Commit) and event.sequence == 0]


def ids(recorded: list[Event]) -> list[int]:
    return [token for commit in commits(recorded) for token in commit.ids]


def timeless(recorded: list[Event]) -> list[dict]:
    """Events as JSON without measured times."""
    return [{key: value for key, value in event.to_json().items() if key != "seconds"} for event in recorded]
