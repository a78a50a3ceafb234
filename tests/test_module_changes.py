"""How many calls between modules one token takes; `python tools/module_changes.py` lists them."""
from __future__ import annotations

import pytest
from module_changes import changes, greedy, speculative


# 214 and 714 before modules were arranged in layers, 147 and 658 before what a step asks for repeatedly was kept, 92
# and 366 before a lane and its streams, classes of 700 lines, became rooms of several files
@pytest.mark.parametrize("start, most", [(greedy, 115), (speculative, 440)])
def test_a_token_passes_through_modules_no_more_often_than_when_it_was_last_counted(start, most):
    counted = changes(start)
    assert 0 < counted.total <= most, counted.counts.most_common(10)
