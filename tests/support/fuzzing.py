"""Generators of damaged input, for the property tests."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 20))
fuzz = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])
NASTY = [
    "",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "=1+1",
    "+cmd|' /C calc'!A0",
    "@x",
    "\t=1",
    "\r=1",
    "</script><script>alert(1)</script>",
    "<!--",
    "{{trace}}",
    "\u2028",
    "\u202e",
    "%s{0}",
    "../../etc/passwd",
    "NaN",
    "1e999",
    "𝔘",
    "é" * 50,
    "a" * 5000,
    "<0xFF>",
    "[SEP]",
    '"',
    "\\",
    "\x85",
    "\n\n",
    "|",
    "=>",
]
NUMBERS = [
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    -float("inf"),
]
texts = st.sampled_from(NASTY) | st.text(st.characters(), max_size=20)
scalars = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.integers() | st.floats() | texts
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
OF_TYPE = {
    int: st.integers(-2, 20) | st.integers(),
    float: st.floats(-2, 2) | st.floats(),
    str: texts,
    bool: st.booleans(),
}


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of everything within a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def put(value: Any, path: tuple, new: Any) -> Any:
    """A copy of a JSON value with another value at a path."""
    if not path:
        return new
    copy = deepcopy(value)
    within = copy
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = new
    return copy


@st.composite
def changed(draw: Callable, value: Any) -> Any:
    """A JSON value with one to three parts replaced, half of them by something of the same type."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(places(value))))
        alike = OF_TYPE.get(type(at(value, place)), junk)
        value = put(value, place, draw(alike | junk))
    return value


def at(value: Any, path: tuple) -> Any:
    """The value at a path of a JSON value."""
    for key in path:
        value = value[key]
    return value


@st.composite
def damaged(draw: Callable, text: str) -> bytes:
    """A text as bytes, with a piece cut out, doubled, or replaced by others."""
    raw = text.encode("utf-8", "surrogatepass")
    start, length = draw(st.integers(0, len(raw))), draw(st.integers(0, 40))
    middle = draw(
        st.binary(max_size=8)
        | st.sampled_from(
            [b"", b"\0", b"\xff", b"\xed\xa0\x80", b'"', b"}", b"[" * 20_000, b"1" * 5000, b"NaN", b"1e999"]
        )
    )
    return raw[:start] + draw(st.sampled_from([middle, raw[start:start + length] * 2])) + raw[start + length:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")
