"""A compiler of grammars with short limits."""
from __future__ import annotations

import pytest
from tables import TableModel
from toys import byte_tokenizer

from playground.grammar import limits

# the last one allows for other load
LATEST = limits.SLOT_SECONDS + limits.WALL_SECONDS + limits.REPEATED_SECONDS + 2
NORMAL = ("lark", 'start: "tea" | "coffee"')


def lark_chain(rules: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(rules)) + f'\nr{rules}: "a"'


@pytest.fixture(scope="module")
def model() -> TableModel:
    return TableModel(tokenizer=byte_tokenizer(merges=80), spread=0.0)
