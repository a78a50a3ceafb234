"""One measured quantity of a model at one context length, round by round. Imports neither torch nor transformers."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Measurement:
    """What `subject` took, one value per measured round: seconds (per forward, token or prompt) or bytes.

    `part` is one of the benchmark's parts, `context` the number of preceding tokens. `same` says whether it wrote the
    plain lane's text, if it wrote any; `failure` says why there are no values.
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
    """The records of one table row, by subject."""
    return {
        record.subject: record
        for record in records
        if (record.part, record.model, record.context) == (part, model, context)
    }
