"""A measured number of one model at one context, round by round. Imports neither torch nor transformers."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Measurement:
    """What `subject` took: seconds (of a forward, of a token, of a prompt) or bytes, one number for each measured
    round.

    `part` is one of the benchmark's parts, `context` the tokens that came before. `same` says whether it wrote what the
    plain lane wrote, where it wrote; `failure` why there are no numbers.
    """

    part: str
    model: str
    context: int
    subject: str
    rounds: list[float] = field(default_factory=list)
    failure: str = ""
    same: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find(records: Iterable[Measurement], part: str, model: str, context: int) -> dict[str, Measurement]:
    """The records of one row of a table, by subject."""
    return {
        record.subject: record
        for record in records
        if (record.part, record.model, record.context) == (part, model, context)
    }
