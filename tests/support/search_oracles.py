"""Samples whose scores are known."""
from __future__ import annotations

from playground.contract import Decoder, find
from playground.contract.assembly import Assembly

BeamSearch, BestOfN, FirstFinish, Labels, MBR, SelfConsistency, Superposed = (
    find(name)
    for name in (
        "beam_search",
        "best_of_n",
        "first_finish",
        "gencls_ppl",
        "mbr",
        "self_consistency",
        "superposed",
    )
)
PROMPT = [0, 1]


def lane_of(decoder: Decoder) -> Assembly:
    return Assembly(decoder, decoder.toggles())
