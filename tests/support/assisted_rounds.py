"""Rows and first rounds of drafts."""
from __future__ import annotations

from collections.abc import Callable

import pytest
from tables import TableModel

from playground.contract import make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from support import speculation
from support.laws import AT_ONE
from support.speculation import first_drafts, speculative_lane


def lane_of(drafter, verifier) -> Assembly:
    decoder = make("speculative")
    decoder.drafter, decoder.verifier = drafter, verifier
    return Assembly(decoder, [make(AT_ONE[0], **AT_ONE[1])])


def first_rounds(models: dict, length: int, **replaced):
    """`first_drafts` of a lane with this drafter or verifier."""
    def assembled(config: LaneConfig) -> Assembly:
        assembly = assemble(config)
        vars(assembly.decoder).update(replaced)
        return assembly

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "assemble", assembled)
        yield from first_drafts(speculative_lane("draft_model", "rejection", AT_ONE, depth=3), models, length)


def rows_of(model: TableModel) -> Callable[[tuple[int, ...]], list[float]]:
    return lambda text: model.scores((0, *text)).softmax(-1).tolist()
