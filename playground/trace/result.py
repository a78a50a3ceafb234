"""What a run came to: a lane's trace, read as text, tokens, metrics and the reason it ended. Imports neither torch nor
gradio.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from playground.events import Branches, Commit, Done, Event, Failed, Header, Judged, Reason
from playground.trace import Trace
from playground.trace.lane_metrics import Difference, diff, metrics
from playground.trace.transcript import Written, sequences


class Output(NamedTuple):
    """One text a strategy returned. The text is cut before the stop string that ended it; the ids are all that were
    generated.
    """

    text: str
    token_ids: list[int]


@dataclass
class Result:
    """Everything about one finished lane, made from its trace alone."""

    trace: Trace

    @property
    def header(self) -> Header:
        return self.trace.headers[0]

    @property
    def strategy(self) -> str:
        return self.header.strategy

    @property
    def text(self) -> str:
        return self._output(self._written[0]).text

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens only, the end token included."""
        return self._output(self._written[0]).token_ids

    @property
    def logprobs(self) -> list[float | None]:
        """Log-probability of each of `token_ids` in nats, before masks and samplers; None where no row was looked at.
        """
        return [token.logprob for token in self._written[0].tokens]

    @cached_property
    def outputs(self) -> list[Output]:
        """Every text that was still alive at the end, best first; the one text where a strategy writes only one."""
        branches = [event for event in self._events if isinstance(event, Branches)]
        dropped = {sequence for event in branches for sequence in event.dropped}
        scores = {sequence: score for event in branches for sequence, score in event.scores.items()}
        # the lane's text is in their place
        became = {event.grown_on for event in self._events if isinstance(event, Commit) and event.grown_on}
        scores[0] = max(
            (scores[sequence] for sequence in became if sequence in scores), default=scores.get(0, float("-inf"))
        )
        alive = [
            sequence
            for sequence in self._written
            if sequence not in dropped | became and self._written[sequence].tokens
        ] or [0]
        best_first = sorted(alive, key=lambda sequence: -scores.get(sequence, float("-inf")))
        return [self._output(self._written[sequence]) for sequence in best_first]

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """By name; `playground.trace.lane_metrics.definitions()` says what each means."""
        return metrics(self.trace)

    @property
    def reason(self) -> Reason:
        """Why it ended: end, length, stop_string, grammar, stopped or failed."""
        last = self._events[-1] if self._events else None
        return last.reason if isinstance(last, Done) else "failed" if isinstance(last, Failed) else "stopped"

    @property
    def message(self) -> str:
        """What went wrong and what to do; empty unless it failed."""
        return next((event.message for event in self._events if isinstance(event, Failed)), "")

    @property
    def judged(self) -> Judged | None:
        """How right the text is; None where no answer was known, and where the lane was stopped or failed."""
        return next((event for event in self._events if isinstance(event, Judged)), None)

    @property
    def begun(self) -> bool:
        """False where the lane could not be set up: its failure is all there is."""
        return not self._events or not isinstance(self._events[0], Failed)

    def difference(self, other: Result) -> Difference | None:
        """First place where its tokens and those of another result differ; None where they are the same."""
        return diff(self.trace, other.trace)

    def to_json(self) -> dict[str, Any]:
        """Plain data: strategy, text, token_ids, outputs, metrics, reason, the verdict where there is one, and the
        message of a failure.
        """
        facts = {
            "strategy": self.strategy,
            "text": self.text,
            "token_ids": self.token_ids,
            "outputs": [output._asdict() for output in self.outputs],
            "metrics": self.metrics,
            "reason": self.reason,
        }
        judged = {"judged": asdict(self.judged)} if self.judged else {}
        return {**facts, **judged, **({"message": self.message} if self.reason == "failed" else {})}

    @property
    def _events(self) -> list[Event]:
        return [stamped.event for stamped in self.trace.events]

    @cached_property
    def _written(self) -> dict[int, Written]:
        return sequences(self.trace.events)

    def _output(self, written: Written) -> Output:
        return Output(cut(written.text, self.header.stop), [token.id for token in written.tokens])


def cut(text: str, stops: list[str]) -> str:
    """The text before the first stop string in it."""
    return text[:min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]
