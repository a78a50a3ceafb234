"""Lanes that search, run to their end, and the best text by brute force."""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

from tables import Law, TableModel, Text, product_law

from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.session import Session
from playground.events import Branches, Event, Figure, Header
from playground.trace.transcript import sequences


def of(name: str, **knobs) -> LaneConfig:
    return LaneConfig(name, knobs)


@dataclass
class Run:
    """A lane run to its end, with its events."""

    lane: Lane
    session: Session
    events: list[Event] = field(init=False)

    def __post_init__(self):
        self.events = [stamped.event for stamped in self.session.trace.events]

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def figure(self, name: str) -> dict:
        return next(event.data for event in reversed(self.of(Figure)) if event.name == name)

    def texts(self) -> dict[int, Text]:
        """The tokens of each sequence, by number."""
        return {
            number: tuple(token.id for token in written.tokens)
            for number, written in sequences(self.session.trace.events).items()
        }

    def finished(self) -> list[tuple[Text, float]]:
        """Texts and ranks of the remaining sequences, best first."""
        scores, texts = [event.scores for event in self.of(Branches) if event.scores][-1], self.texts()
        return sorted(((texts[number], score) for number, score in scores.items()), key=lambda pair: -pair[1])


def run(config: LaneConfig, model, prompt: list[int], length: int, seed: int = 0) -> Run:
    assembly = assemble(config)
    lane = Lane(prompt, {"target": model}, assembly, Limits(seed, length), Recorder(model.tokens))
    session = Session([Header()], [Runner(lane, assembly)])
    for _ in session:
        pass
    assert lane.reason in ("end", "length"), session.trace.events[-1]
    return Run(lane, session)


def logp(model: TableModel, prompt: list[int], text: Text) -> float:
    """Log-probability of a text by the chain rule."""
    return sum(float(model.scores((*prompt, *text[:i])).log_softmax(-1)[token]) for i, token in enumerate(text))


def chosen_by_brute_force(
    model: TableModel, prompt: list[int], length: int, n: int, choose: Callable[[list[Text]], Text]
) -> Law:
    """The output distribution of a choice among n independent texts, by enumeration."""
    outcomes, total = product_law(model, prompt, length), defaultdict(float)
    for texts in product(outcomes, repeat=n):
        total[choose(list(texts))] += math.prod(outcomes[text] for text in texts)
    return dict(total)


def entire(texts: list[Text], model: TableModel) -> list[Text]:
    ended = [text for text in texts if text[-1] in model.end_ids]
    return ended or texts
