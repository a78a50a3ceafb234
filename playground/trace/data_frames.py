"""The data frames of a result, for analysis. Imports neither torch nor gradio, and pandas when one is made."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from playground.errors import Refusal
from playground.trace import Trace
from playground.trace.csv_export import COLUMN_TYPES, COLUMNS, rows
from playground.trace.tables import (
    AlternativeRow,
    CacheRow,
    DraftRow,
    RoundRow,
    alternatives,
    caches,
    draft_tokens,
    rounds,
    rounds_of_tokens,
)

if TYPE_CHECKING:
    from pandas import DataFrame


class DataFrames:
    """What a result has as tables, all computed from its trace."""

    trace: Trace

    def to_dataframe(self) -> DataFrame:
        """A pandas DataFrame with one row per token and the columns of the CSV file; the text is sequence 0.

        Raises Refusal if pandas is not installed; so do the other data frames.
        """
        return _frame(rows(self.trace.headers[0], self.trace.events), COLUMNS).astype(COLUMN_TYPES)

    def tokens(self) -> DataFrame:
        """`to_dataframe` with two more columns: the `round` of drafting that wrote the token, if one did, and its
        `candidates`, the most probable tokens as (text, probability before masks and samplers).
        """
        table, events = self.to_dataframe(), self.trace.events
        found: dict[tuple[int, int], list[tuple[str, float]]] = defaultdict(list)
        for row in alternatives(events):
            found[row.sequence, row.position].append((row.text, row.probability))
        places, written = list(zip(table["sequence"], table["position"])), rounds_of_tokens(events)
        table["round"] = [written.get(place) for place in places]
        table["candidates"] = [found.get(place, []) for place in places]
        return table.astype({"round": "Int64"})

    def cache(self) -> DataFrame:
        """A pandas DataFrame with one row per commit and stream of a KV cache, with the columns of `CacheRow`."""
        return _frame(caches(self.trace.events), CacheRow._fields)

    def drafts(self) -> DataFrame:
        """A pandas DataFrame with one row per draft token of every verified draft, with the columns of `DraftRow`."""
        return _frame(draft_tokens(self.trace.events), DraftRow._fields)

    def rounds(self) -> DataFrame:
        """A pandas DataFrame with one row per round of drafting and verification, with the columns of `RoundRow`."""
        return _frame(rounds(self.trace.events), RoundRow._fields).astype({"id": "Int64"})

    def alternatives(self) -> DataFrame:
        """A pandas DataFrame with one row per recorded candidate of a token, with the columns of `AlternativeRow`."""
        return _frame(alternatives(self.trace.events), AlternativeRow._fields)


def _frame(table: Iterable[Iterable], columns: Iterable[str]) -> DataFrame:
    try:
        from pandas import DataFrame
    except ImportError:
        raise Refusal("A data frame needs pandas: install it with `pip install pandas`.") from None
    return DataFrame(list(table), columns=list(columns))
