"""A table model with separate early exits."""
from __future__ import annotations

from tables import TableModel


class EarlyTable(TableModel):
    """Its early exit has another distribution."""

    leaving = False

    def __post_init__(self):
        super().__post_init__()
        self.early = TableModel(self.letters, self.ends, self.seed + 1)

    def forward(self, works, plan=None):
        self.leaving = plan is not None and plan.stop is not None
        return super().forward(works, plan)

    def scores(self, context):
        return self.early.scores(context) if self.leaving else super().scores(context)
