"""Rewards that are functions of the text, so that a search with them can be computed by hand."""
from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from tables import Text

from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble


class Scripted:
    """A reward by a rule on all tokens of a text, prompt included."""

    def __init__(self, rule: Callable[[Text], float]):
        self.rule, self.asked = rule, []

    def scores(self, lm, texts):
        yield from ()
        self.asked += [tuple(text.tokens) for text in texts]
        return [self.rule(tuple(text.tokens)) for text in texts]


def hashed(text: Text) -> float:
    """An arbitrary reward between 0.05 and 0.95, different for every text."""
    return 0.05 + 0.9 * int.from_bytes(blake2b(repr(text).encode(), digest_size=4).digest(), "big") / 2**32


def scripted(name: str, rule: Callable[[Text], float] = hashed, cls: type | None = None, **knobs) -> Assembly:
    """A lane of a strategy, or of a variant `cls` of it, with a scripted reward."""
    assembly = assemble(LaneConfig(name, {"reward": "likelihood", **knobs}))
    if cls:
        assembly.decoder = cls(**assembly.decoder.values())
    assembly.decoder._reward = Scripted(rule)
    return assembly
