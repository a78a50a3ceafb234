"""What drafters remember is shared between runs: a copy takes no entries along, and neither changes the other."""
from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playground.algorithms.speculative.shared_table import SharedTable

ENTRIES = st.tuples(st.integers(0, 9), st.integers(0, 99))
STEPS = st.lists(st.one_of(ENTRIES, st.just("copy")), max_size=40)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_copies_are_dictionaries_of_their_own(steps):
    tables = [(SharedTable(), {})]
    for number, step in enumerate(steps):
        table, expected = tables[number % len(tables)]
        if step == "copy":
            tables.append((deepcopy(table), dict(expected)))
        else:
            table[step[0]] = expected[step[0]] = step[1]
    for table, expected in tables:
        assert table == expected and len(table) == len(expected) == len(list(table))
        assert all((key in table) == (key in expected) for key in range(10))


def test_a_copy_holds_the_entries_themselves_and_few_layers():
    table = SharedTable()
    for run in range(200):
        table = deepcopy(table)
        table[run] = [run]
    copy = deepcopy(table)
    assert all(copy[run] is table[run] for run in range(200))
    assert len(copy._layers) <= 10  # so that a look-up stays cheap
    with pytest.raises(TypeError):
        del copy[0]
