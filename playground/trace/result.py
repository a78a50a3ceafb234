"""The result of a run, read from its trace: text, tokens, metrics and reason. Imports neither torch nor gradio."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from playground.events import Branches, Commit, Done, Event, Failed, Header, Judged, Note, Reason
from playground.request_limits import quoted
from playground.trace import Trace
from playground.trace.data_frames import DataFrames
from playground.trace.lane_metrics import Difference, diff, metrics
from playground.trace.thinking import thinking_and_answer
from playground.trace.transcript import Written, sequences


class Output(NamedTuple):
    """One text that a strategy returned, cut before the stop string that ended it, and all ids that were generated."""

    text: str
    token_ids: list[int]


@dataclass(repr=False)
class Result(DataFrames):
    """One finished lane, computed from its trace alone."""

    trace: Trace

    def __repr__(self) -> str:
        facts = f"{self.strategy}: {len(self.token_ids)} tokens, {self.reason}"
        return f"<Result of {facts}, {quoted(self.message or self.text)}>"

    @property
    def header(self) -> Header:
        return self.trace.headers[0]

    @property
    def strategy(self) -> str:
        return self.header.strategy

    @property
    def text(self) -> str:
        """The generated text, cut before the stop string that ended it."""
        return self._output(self._written[0]).text

    @property
    def thinking(self) -> str:
        """What the text thinks, without its tags; empty if the model's tags are not known, or not in the text."""
        return self._thinking_and_answer[0]

    @property
    def answer(self) -> str:
        """The text without its thinking parts, cut before the stop string that ended it."""
        return cut(self._thinking_and_answer[1], self.header.stop)

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens, the end token included."""
        return self._output(self._written[0]).token_ids

    @property
    def logprobs(self) -> list[float | None]:
        """Log-probability in nats of each of `token_ids`, before masks and samplers; None if it was not recorded."""
        return [token.logprob for token in self._written[0].tokens]

    @cached_property
    def outputs(self) -> list[Output]:
        """All texts that were live at the end, best first; a single text for most strategies."""
        branches = [event for event in self._events if isinstance(event, Branches)]
        dropped = {sequence for event in branches for sequence in event.dropped}
        scores = {sequence: score for event in branches for sequence, score in event.scores.items()}
        # sequences that became the lane's text, which takes their score
        adopted = {event.grown_on for event in self._events if isinstance(event, Commit) and event.grown_on}
        scores[0] = max(
            (scores[sequence] for sequence in adopted if sequence in scores), default=scores.get(0, float("-inf"))
        )
        live = [
            sequence
            for sequence in self._written
            if sequence not in dropped | adopted and self._written[sequence].tokens
        ] or [0]
        best_first = sorted(live, key=lambda sequence: -scores.get(sequence, float("-inf")))
        return [self._output(self._written[sequence]) for sequence in best_first]

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Metrics by name; `playground.trace.lane_metrics.definitions()` defines them."""
        return metrics(self.trace)

    @property
    def reason(self) -> Reason:
        """Why it ended: end, length, stop_string, grammar, stopped or failed."""
        last = self._events[-1] if self._events else None
        return last.reason if isinstance(last, Done) else "failed" if isinstance(last, Failed) else "stopped"

    @property
    def ended(self) -> bool:
        """Whether its last event is recorded, so that nothing more will be generated."""
        return bool(self._events) and isinstance(self._events[-1], (Done, Failed))

    @property
    def message(self) -> str:
        """The error and what to do about it, if the lane failed; what limited the text, if it was not the length that
        was asked for; else empty.
        """
        last = self._events[-1] if self._events else None
        if isinstance(last, Done):
            return last.limit
        return next((event.message for event in self._events if isinstance(event, Failed)), "")

    @property
    def notes(self) -> list[str]:
        """What the lane said of itself while it ran, each sentence once: that the draft model's context was full, what
        of a constraint enforces nothing, which settings of the checkpoint it applied.
        """
        return list(dict.fromkeys(event.text for event in self._events if isinstance(event, Note)))

    @property
    def judged(self) -> Judged | None:
        """The score of the text; None without a known answer, and if the lane was stopped or failed."""
        return next((event for event in self._events if isinstance(event, Judged)), None)

    @property
    def begun(self) -> bool:
        """False if the lane could not be set up, so that Failed is its only event."""
        return not self._events or not isinstance(self._events[0], Failed)

    def difference(self, other: Result) -> Difference | None:
        """The first token in which this result and another differ; None if they are the same."""
        return diff(self.trace, other.trace)

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain data: strategy, text, token_ids, outputs, metrics, reason, and if present `thinking` with `answer`,
        `judged` and `message`.
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
        if self.metrics["thinking_tokens"] is not None:
            facts |= {"thinking": self.thinking, "answer": self.answer}
        return {**facts, **judged, **({"message": self.message} if self.message else {})}

    @property
    def _events(self) -> list[Event]:
        return [stamped.event for stamped in self.trace.events]

    @cached_property
    def _written(self) -> dict[int, Written]:
        return sequences(self.trace.events)

    @cached_property
    def _thinking_and_answer(self) -> tuple[str, str]:
        return thinking_and_answer(self.header, self._written[0])

    def _output(self, written: Written) -> Output:
        return Output(cut(written.text, self.header.stop), [token.id for token in written.tokens])


def cut(text: str, stops: list[str]) -> str:
    """The text up to the first stop string in it."""
    return text[:min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]
